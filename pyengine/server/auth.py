"""API keys: who may call, on every port that generates."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from pyengine.errors import ConfigError, UnauthenticatedError

#: the environment's variable with one key; a flag would show it to everyone who lists processes
KEY_VARIABLE = "PYENGINE_API_KEY"
_SCHEME = "bearer "


class ApiKeys:
    """The keys that are accepted. Without any, everybody is.

    Only digests are kept, so that no key can get into a log, a metric or an error.

    Args:
        keys: printable ASCII without spaces.

    Raises:
        ValueError: for any other key.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        keys = list(keys)
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise ValueError("keys must be printable ASCII without spaces, and not empty")
        self._digests = [_digest(key) for key in keys]

    @property
    def are_needed(self) -> bool:
        """Whether a call must bring a key."""
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Check the value of a call's `authorization` header, "Bearer KEY".

        Raises:
            UnauthenticatedError: it holds none of the keys.
        """
        if not self._digests:
            return
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise UnauthenticatedError("authorization: this server wants an API key, as 'Bearer KEY'")
        given = _digest(authorization[len(_SCHEME) :].strip())
        # Every key is compared, in constant time: how long it takes says nothing about how near a guess is.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise UnauthenticatedError("authorization: the API key is not one of this server's")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_api_keys(path: str | None, variable: str | None) -> ApiKeys:
    """The keys of a file, one a line ("#" begins a comment line), and of the environment.

    Args:
        path: of the file; None for none.
        variable: the value of `KEY_VARIABLE`; None where it is unset.

    Raises:
        ConfigError: the file cannot be read or holds no keys, or a key has a wrong form.
    """
    keys: list[str] = []
    if path is not None:
        try:
            lines = [line.strip() for line in Path(path).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("api_key_file", f"cannot read {path}: {error}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError("api_key_file", f"{path} holds no keys")
    source = "api_key_file"
    try:
        accepted = ApiKeys(keys)
        source = KEY_VARIABLE
        return accepted if variable is None else ApiKeys([*keys, variable])
    except ValueError as error:
        raise ConfigError(source, str(error)) from None
