"""API keys: who may call, on every port that generates."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import ConfigError, UnauthenticatedError
from pyengine.tenants import Tenant

#: the environment's variable with one key; a flag would show it to everyone who lists processes
KEY_VARIABLE = "PYENGINE_API_KEY"
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a call has."""

    tenant: str | None = None  # None: nobody's in particular
    trusted: bool = False  # it speaks for other tenants too


#: Who makes the call that is being handled. Set where its key is checked, in the call's own task.
CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039, a frozen value


class ApiKeys:
    """The keys that are accepted. Without any, everybody is.

    Only digests are kept, so that no key can get into a log, a metric or an error.

    Args:
        keys: printable ASCII without spaces.
        callers: SHA-256 digests of further keys, and whose they are.

    Raises:
        ValueError: for any other key.
    """

    def __init__(self, keys: Iterable[str] = (), callers: Mapping[bytes, Caller] | None = None) -> None:
        self._callers = {digest_of(key): Caller() for key in keys} | dict(callers or {})

    @property
    def are_needed(self) -> bool:
        """Whether a call must bring a key."""
        return bool(self._callers)

    def check(self, authorization: str | None) -> Caller:
        """Check the value of a call's `authorization` header, "Bearer KEY", and say whose key it is.

        Raises:
            UnauthenticatedError: it holds none of the keys.
        """
        if not self._callers:
            return Caller()
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise UnauthenticatedError("authorization: this server wants an API key, as 'Bearer KEY'")
        given = _digest(authorization[len(_SCHEME) :].strip())
        # Every key is compared, in constant time: how long it takes says nothing about how near a guess is.
        matches = [caller for digest, caller in self._callers.items() if hmac.compare_digest(given, digest)]
        if not matches:
            raise UnauthenticatedError("authorization: the API key is not one of this server's")
        return matches[0]


def digest_of(key: str) -> bytes:
    """A key's SHA-256.

    Raises:
        ValueError: it is no printable ASCII without spaces.
    """
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("keys must be printable ASCII without spaces, and not empty")
    return _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_api_keys(
    path: str | None, variable: str | None, tenants: Sequence[Tenant] = (), environment: Mapping[str, str] | None = None
) -> ApiKeys:
    """The keys of a file, one a line ("#" begins a comment line), of the environment, and of tenants.

    Args:
        path: of the file; None for none.
        variable: the value of `KEY_VARIABLE`; None where it is unset.
        tenants: whose keys are accepted too.
        environment: that tenants' keys are looked up in.

    Raises:
        ConfigError: the file cannot be read or holds no keys, or a key has a wrong form, is not set, or is there twice.
    """
    callers = _tenants_callers(tenants, environment or {})
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
        own = {digest_of(key) for key in keys}
        source = KEY_VARIABLE
        own |= set() if variable is None else {digest_of(variable)}
    except ValueError as error:
        raise ConfigError(source, str(error)) from None
    for digest in own & set(callers):
        raise ConfigError("tenants", f"tenant {callers[digest].tenant}: api_keys: a key is one of the server's own too")
    return ApiKeys(callers=dict.fromkeys(own, Caller()) | callers)


def _tenants_callers(tenants: Sequence[Tenant], environment: Mapping[str, str]) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    for tenant in tenants:
        for key in tenant.api_keys:
            digest = key.sha256
            if digest is None:
                assert key.env is not None
                try:
                    digest = digest_of(environment[key.env])
                except KeyError:
                    raise ConfigError("tenants", f"tenant {tenant.name}: the environment has no {key.env}") from None
                except ValueError as error:
                    raise ConfigError("tenants", f"tenant {tenant.name}: {key.env}: {error}") from None
            if digest in callers:
                raise ConfigError("tenants", f"tenant {tenant.name}: api_keys: a key is {callers[digest].tenant}'s already")
            callers[digest] = Caller(tenant.name, key.trusted)
    return callers
