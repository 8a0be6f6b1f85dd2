"""Addresses to listen on."""

from __future__ import annotations

import socket

from pyengine.errors import UnavailableError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UnavailableError: the address cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)  # a second listener is refused here, not by bind
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from None
    return listener


def check_address(host: str, port: int) -> None:
    """gRPC reports an address in use through log lines of its own and a generic error; a plain socket says what is wrong.

    Raises:
        UnavailableError: the address cannot be listened on.
    """
    listen(host, port).close()
