"""Addresses to listen on."""

from __future__ import annotations

import socket
from contextlib import suppress

from pyengine.errors import UnavailableError

#: By when a peer is given up that acknowledges nothing: of gRPC's pings, of TCP's probes or of what was sent.
PEER_IDLE_SECONDS = 60  # before it is asked
PEER_ANSWER_SECONDS = 20  # until it must have answered
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, whose connections end if their peers vanish without a word.

    Raises:
        UnavailableError: the address cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_lost_peers(listener)
        listener.bind((host, port))
        listener.listen(128)  # a second listener is refused here, not by bind
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from None
    return listener


def _notice_lost_peers(listener: socket.socket) -> None:
    """Accepted sockets inherit this. What a platform lacks is left out."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    num_probes = 2
    for name, value in (
        ("TCP_KEEPIDLE", PEER_IDLE_SECONDS),
        ("TCP_KEEPALIVE", PEER_IDLE_SECONDS),  # macOS calls it so
        ("TCP_KEEPINTVL", PEER_ANSWER_SECONDS // num_probes),
        ("TCP_KEEPCNT", num_probes),
        # Probes are sent on idle connections alone; this is for one with data on its way. It is milliseconds.
        ("TCP_USER_TIMEOUT", (PEER_IDLE_SECONDS + PEER_ANSWER_SECONDS) * 1000),
    ):
        with suppress(AttributeError, OSError):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_address(host: str, port: int) -> None:
    """gRPC reports an address in use through log lines of its own and a generic error; a plain socket says what is wrong.

    Raises:
        UnavailableError: the address cannot be listened on.
    """
    listen(host, port).close()
