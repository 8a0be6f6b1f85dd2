"""Who shares the engine, and on what terms: the file that `--tenants` names.

YAML or JSON. One entry a tenant; only `name` must be there:

    tenants:
      - name: research
        weight: 2              # of its share of slots, tokens and blocks, beside the others that have requests
        kv_quota: 0.5          # share of the KV blocks that it may hold; never exceeded
        max_concurrent: 32     # sequences that run at once
        max_queued: 100        # choices in flight beyond those
        rate: 20               # requests a second, on average; each prompt is one, whatever its n
        burst: 40              # and at once; `rate` by default
        priority_cap: -5       # the most urgent (lowest) priority that its requests may have; 0 by default
        cache_group: campus    # tenants of one group share cached prefixes; each is alone by default
        api_keys:
          - sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
          - env: RESEARCH_KEY  # the variable that holds a key
            trusted: true      # x-tenant is believed from this key, a gateway's perhaps

Requests of nobody in particular are the tenant `default`'s, which is there whether or not the file has it. Keys are in no file:
it has their digests (`printf %s KEY | sha256sum`), or names the variables that hold them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from pyengine.errors import ConfigError

DEFAULT_TENANT = "default"
MAX_WEIGHT = 1e6
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # goes into labels, log lines and cache salts


@dataclass(frozen=True, kw_only=True)
class TenantKey:
    """An API key of a tenant, by its digest or by the environment variable that holds it; one of the two is set."""

    sha256: bytes | None = None
    env: str | None = None
    trusted: bool = False  # x-tenant is believed from this key


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One tenant's terms."""

    name: str
    weight: float = 1.0
    kv_quota: float = 1.0  # share of the KV blocks
    max_concurrent: int | None = None  # sequences that run at once; None: as many as the engine runs
    max_queued: int | None = None  # choices in flight beyond those; None: as many as the server takes
    rate: float | None = None  # prompts a second; None: unlimited
    burst: float | None = None  # prompts at once; None: `rate`, and 1 at least
    priority_cap: int = 0  # the lowest priority, which is the most urgent, that its requests may have
    cache_group: str | None = None  # None: its own
    api_keys: tuple[TenantKey, ...] = ()

    @property
    def is_rationed(self) -> bool:
        """Whether its KV blocks must be counted."""
        return self.kv_quota < 1.0

    def cache_salt(self, salt: str | None) -> str | None:
        """The salt that its prefixes are cached under: other groups' never match it, whatever their requests send."""
        if salt is None and self.name == DEFAULT_TENANT and self.cache_group is None:
            return None  # so that a gateway learns of these blocks as it would without tenants
        group = f"tenant {self.name}" if self.cache_group is None else f"group {self.cache_group}"
        return group if salt is None else f"{group} {salt}"


def load_tenants(path: str | None) -> tuple[Tenant, ...]:
    """The tenants of a file, `default` among them; none without a file.

    Args:
        path: ".json" is read as JSON, everything else as YAML.

    Raises:
        ConfigError: naming the file, the tenant and the field.
    """
    if path is None:
        return ()
    try:
        text = Path(path).read_text()
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("tenants", f"cannot read {path}: {' '.join(str(error).split())}") from None
    try:
        tenants = _parse(content)
    except ValueError as error:
        raise ConfigError("tenants", f"{path}: {error}") from None
    return tenants


def _parse(content: Any) -> tuple[Tenant, ...]:
    if not isinstance(content, Mapping) or not isinstance(content.get("tenants"), Sequence) or set(content) != {"tenants"}:
        raise ValueError("must hold a list named tenants, and nothing else")
    tenants = [_tenant(entry, f"tenants[{i}]") for i, entry in enumerate(content["tenants"])]
    seen: set[str] = set()
    digests: set[bytes | str] = set()
    for tenant in tenants:
        if tenant.name in seen:
            raise ValueError(f"tenant {tenant.name} is there twice")
        seen.add(tenant.name)
        for key in tenant.api_keys:
            identity = key.env if key.sha256 is None else key.sha256
            assert identity is not None
            if identity in digests:
                raise ValueError(f"tenant {tenant.name}: api_keys: two entries are the same key")
            digests.add(identity)
    if DEFAULT_TENANT not in seen:
        tenants.append(Tenant(name=DEFAULT_TENANT))
    return tuple(tenants)


def _tenant(entry: Any, where: str) -> Tenant:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a mapping")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: name must be 1 to 64 of A-Z a-z 0-9 _ . -, got {name!r}")
    where = f"tenant {name}"
    unknown = [key for key in entry if key not in {field.name for field in fields(Tenant)}]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}")
    values = dict(entry)
    for field, low, high in (("weight", 0.0, MAX_WEIGHT), ("kv_quota", 0.0, 1.0), ("rate", 0.0, 1e6), ("burst", 0.0, 1e6)):
        if values.get(field) is not None:
            values[field] = _number(values[field], low, high, f"{where}: {field}")
    for field, least in (("max_concurrent", 1), ("max_queued", 0), ("priority_cap", -(2**31))):
        if values.get(field) is not None:
            values[field] = _integer(values[field], least, f"{where}: {field}")
    group = values.get("cache_group")
    if group is not None and (not isinstance(group, str) or not _NAME.fullmatch(group)):
        raise ValueError(f"{where}: cache_group must be 1 to 64 of A-Z a-z 0-9 _ . -, got {group!r}")
    keys = values.get("api_keys")
    keys = [] if keys is None else keys
    if not isinstance(keys, list):
        raise ValueError(f"{where}: api_keys must be a list")
    values["api_keys"] = tuple(_key(key, f"{where}: api_keys[{i}]") for i, key in enumerate(keys))
    if values.get("burst") is not None and values.get("rate") is None:
        raise ValueError(f"{where}: burst needs rate")
    # An empty value stands for the default, as it does everywhere in YAML.
    return Tenant(**{field: value for field, value in values.items() if value is not None})


def _number(value: Any, low: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low < value <= high:
        raise ValueError(f"{where} must be a number above {low:g} and at most {high:g}, got {value!r}")
    return float(value)


def _integer(value: Any, least: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{where} must be an integer from {least} on, got {value!r}")
    return value


def _key(entry: Any, where: str) -> TenantKey:
    """What is wrong with a key is said without showing it: it may be the key itself."""
    if not isinstance(entry, Mapping) or not set(entry) <= {"sha256", "env", "trusted"}:
        raise ValueError(f"{where} must hold sha256 or env, and trusted at most beside it")
    digest, variable, trusted = entry.get("sha256"), entry.get("env"), entry.get("trusted", False)
    if (digest is None) == (variable is None):
        raise ValueError(f"{where} must hold one of sha256 and env")
    if not isinstance(trusted, bool):
        raise ValueError(f"{where}: trusted must be true or false")
    if variable is not None:
        if not isinstance(variable, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise ValueError(f"{where}: env must be the name of an environment variable")
        return TenantKey(env=variable, trusted=trusted)
    size = hashlib.sha256().digest_size
    if not isinstance(digest, str) or not re.fullmatch(f"[0-9A-Fa-f]{{{2 * size}}}", digest):
        raise ValueError(f"{where}: sha256 must be {2 * size} hexadecimal digits, the digest of a key")
    return TenantKey(sha256=bytes.fromhex(digest), trusted=trusted)
