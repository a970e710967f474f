"""The key file: API keys as SHA-256 hashes, and the tenants that they belong to, with their limits.

JSON, written by `twinpool keys` and by hand, read by routers::

    {"tenants": {"acme": {"requests_per_minute": 600}}, "keys": [{"id": "...", "tenant": "acme", "sha256": "..."}]}

A key is 256 random bits, so its hash needs neither salt nor stretching. A tenant without limits need not be listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.outside_data import read_json

KEY_PREFIX = "tp-"
TENANT_CHARS = 64
"""The most characters of a tenant's name."""
MAX_WEIGHT = 1000
_TENANT = re.compile(rf"[A-Za-z0-9_.-]{{1,{TENANT_CHARS}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may ask for; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers together."""
    concurrent: int = 0
    """Answers in flight."""
    priority: int = 0
    """The highest priority that its requests may have."""
    models: tuple[str, ...] = ()
    """Names of models; empty: all."""
    ttft_slo_ms: int = 0
    """Milliseconds to the first token beyond which its answers are of no use; 0: as `router.ttft_slo_ms` says."""
    weight: int = 1
    """Its share of workers that are busy, beside other tenants' weights; 1 to `MAX_WEIGHT`."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its secret."""

    id: str
    tenant: str
    sha256: str
    created: str = ""
    """When, in ISO 8601."""
    expires: str = ""
    """When it ends, in ISO 8601 with the zone; empty: never."""

    def expired(self, now: datetime) -> bool:
        return bool(self.expires) and now >= datetime.fromisoformat(self.expires)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a key file."""

    keys: tuple[ApiKey, ...] = ()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits(self, tenant: str) -> TenantLimits:
        return self.tenants.get(tenant, TenantLimits())


def digest_of(secret: str) -> str:
    """Return the hash under which a secret is kept."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def mint_key(tenant: str, created: str, expires: str = "") -> tuple[str, ApiKey]:
    """Return a new secret, which nothing else knows, and its key."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    digest = digest_of(secret)
    return secret, ApiKey(digest[:12], tenant, digest, created, expires)


def read_key_file(path: Path) -> KeyFile:
    """Read a key file. Raises `ConfigError` where it can't be read, naming what is wrong."""
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the key file {path}: {error}") from None
    if not isinstance(tree, dict) or tree.keys() - {"keys", "tenants"}:
        raise ConfigError(f"the key file {path} must be an object of keys and tenants")
    keys, tenants = tree.get("keys", []), tree.get("tenants", {})
    if not isinstance(keys, list) or not isinstance(tenants, dict):
        raise ConfigError(f"the key file {path} must have a list of keys and an object of tenants")
    return KeyFile(
        tuple(_key(key, f"{path}: keys[{number}]") for number, key in enumerate(keys)),
        {
            check_tenant(name, f"{path}: tenants: "): _limits(limits, f"{path}: tenants.{name}")
            for name, limits in tenants.items()
        },
    )


def write_key_file(path: Path, content: KeyFile) -> None:
    """Replace a key file in one step; only its owner may read it."""
    tree = {
        "tenants": {name: dataclasses.asdict(limits) for name, limits in content.tenants.items()},
        "keys": [dataclasses.asdict(key) for key in content.keys],
    }
    path = path.resolve()
    handle, written = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # With mode 600.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(tree, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise


def check_tenant(name: object, where: str = "") -> str:
    """Return a tenant's name. Raises `ConfigError` for what can't be one; `where`: the beginning of its message."""
    if not isinstance(name, str) or not _TENANT.fullmatch(name):
        raise ConfigError(
            f"{where}a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores; got {name!r}"
        )
    return name


def _key(key: object, where: str) -> ApiKey:
    known = {f.name for f in dataclasses.fields(ApiKey)}
    if not isinstance(key, dict) or key.keys() - known or not all(isinstance(value, str) for value in key.values()):
        raise ConfigError(f"{where} must be an object of texts: {', '.join(sorted(known))}")
    if not key.get("id") or not _DIGEST.fullmatch(key.get("sha256", "")):
        raise ConfigError(f"{where} needs an id and a sha256 of 64 hexadecimal digits")
    check_tenant(key.get("tenant"), f"{where}: ")
    if expires := key.get("expires"):
        try:
            aware = datetime.fromisoformat(expires).tzinfo is not None
        except ValueError:
            aware = False
        if not aware:
            raise ConfigError(f"{where}.expires must be a time with its zone, as 2030-01-31T12:00:00+00:00")
    return ApiKey(**key)


def _limits(limits: object, where: str) -> TenantLimits:
    known = {f.name: f for f in dataclasses.fields(TenantLimits)}
    if not isinstance(limits, dict) or limits.keys() - known.keys():
        raise ConfigError(f"{where} must be an object of {', '.join(known)}")
    values: dict[str, Any] = dict(limits)
    models = values.pop("models", [])
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise ConfigError(f"{where}.models must be an array of names")
    for name, value in values.items():
        if type(value) is not int or (value < 0 and name != "priority"):
            raise ConfigError(f"{where}.{name} must be a whole number, 0 or more; got {value!r}")
    if not 1 <= values.get("weight", 1) <= MAX_WEIGHT:
        raise ConfigError(f"{where}.weight must be 1 to {MAX_WEIGHT}; got {values['weight']}")
    return TenantLimits(**values, models=tuple(models))
