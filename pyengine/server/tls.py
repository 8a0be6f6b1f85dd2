"""TLS on every port, from the same files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pyengine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of a server.

    Raises:
        ConfigError: naming the flag whose file is missing or unusable.
    """

    certificate: str  # chain, the server's own first
    key: str
    client_ca: str | None = None  # clients must show a certificate that one of these signed

    def __post_init__(self) -> None:
        for name, path in (("ssl_certfile", self.certificate), ("ssl_keyfile", self.key), ("ssl_ca_certs", self.client_ca)):
            if path is not None:
                _read(name, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password is never asked for: nobody may be there to answer.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                "ssl_certfile", f"{self.certificate} and {self.key} are no certificate and its key: {error}"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError("ssl_ca_certs", f"{self.client_ca} holds no certificates: {error}") from None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        ca = None if self.client_ca is None else _read("ssl_ca_certs", self.client_ca)
        pair = (_read("ssl_keyfile", self.key), _read("ssl_certfile", self.certificate))
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def uvicorn_options(self, *, ask_clients: bool) -> dict[str, Any]:
        """Arguments of uvicorn.Config. Probes and Prometheus have no certificates, and their port does not ask for one."""
        options: dict[str, Any] = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        if ask_clients and self.client_ca is not None:
            options |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path}: {error.strerror or error}") from None
