"""`twinpool keys`: make, list and revoke API keys. Routers read their file again when it changes."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.key_file import ApiKey, KeyFile, check_tenant, mint_key, read_key_file, write_key_file

_SPAN = re.compile(r"(\d{1,5})([dhm])")
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}


def new_key(path: Path, tenant: str, expires: str = "") -> str:
    """Add a key of `tenant` to the file, which is made where there is none; returns its secret, which isn't kept.

    `expires`: after how long, as 90d, 12h or 30m; empty: never. Raises `ConfigError`.
    """
    check_tenant(tenant)
    now = datetime.now(UTC)
    ends = (now + _span(expires)).isoformat(timespec="seconds") if expires else ""
    content = read_key_file(path) if path.exists() else KeyFile()
    secret, key = mint_key(tenant, now.isoformat(timespec="seconds"), ends)
    write_key_file(path, dataclasses.replace(content, keys=(*content.keys, key)))
    return secret


def revoke_key(path: Path, key_id: str) -> str:
    """Take a key out of the file; returns its id. Raises `ConfigError` where there is none with that id."""
    content = read_key_file(path)
    kept = tuple(key for key in content.keys if key.id != key_id)
    if len(kept) == len(content.keys):
        raise ConfigError(f"{path} has no key {key_id}: twinpool keys list shows them")
    write_key_file(path, dataclasses.replace(content, keys=kept))
    return key_id


def list_keys(path: Path) -> Table:
    """Return the keys of the file, with what their tenants may ask for."""
    content = read_key_file(path)
    shown = Table("id", "tenant", "created", "expires", "requests/min", "tokens/min", "at a time", "priority", "models")
    for key in content.keys:
        limits = content.limits(key.tenant)
        numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent)
        shown.add_row(
            key.id, key.tenant, key.created, _ending(key), *(f"{n:,}" if n else "" for n in numbers),
            str(limits.priority), ", ".join(limits.models),
        )  # fmt: skip
    return shown


def _ending(key: ApiKey) -> str:
    if key.expired(datetime.now(UTC)):
        return f"[red]{key.expires}, expired[/]"
    return key.expires or "never"


def _span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text)
    if found is None or not int(found[1]):
        raise ConfigError(f"--expires takes days, hours or minutes, such as 90d, 12h or 30m; got {text!r}")
    return int(found[1]) * _UNITS[found[2]]
