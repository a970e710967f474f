"""The subcommands beside a cluster: simulated ones, loads and plans, keys and certificates, the demonstration."""

from __future__ import annotations

import argparse
import dataclasses
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table

from twinpool.cli.command_output import FINE, REFUSED, print_line, print_table
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


def sim(args: argparse.Namespace) -> int:
    from twinpool.sim.run import sim_command
    from twinpool.sim.run.sim_command import ClusterKind

    if args.requests is not None:
        return _sim_scale(args)
    for flag in _SCALE_FLAGS:
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is for sim --requests N")
    if args.colocate and args.conditional:
        raise ConfigError("--colocate and --conditional are two kinds of cluster: give one of them")
    kind = (
        ClusterKind.COLOCATED if args.colocate else ClusterKind.CONDITIONAL if args.conditional else ClusterKind.POOLS
    )
    good = sim_command.sim(args.seed, args.seeds, args.jobs, args.shrink, args.first, print_line, kind)
    return FINE if good else REFUSED


_SCALE_FLAGS = ("workers", "seconds", "policy", "trace", "replay")
"""Flags of `sim --requests`."""


def _sim_scale(args: argparse.Namespace) -> int:
    from twinpool.sim.scale.scale_command import ScaleOptions, simulate_scale

    for flag in ("seeds", "colocate", "conditional", "shrink", "first"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is not for sim --requests, which draws no faults")
    given = {flag: getattr(args, flag) for flag in ("seed", *_SCALE_FLAGS) if getattr(args, flag) is not None}
    options = ScaleOptions(**{"workers": 8, "requests": args.requests} | given)
    return FINE if simulate_scale(options, print_line) else REFUSED


def replay(args: argparse.Namespace) -> int:
    from twinpool.cli.replay import replay_command

    options = replay_command.ReplayOptions.of(args)
    return FINE if replay_command.replay(options, print_line, print_table) else REFUSED


def plan(args: argparse.Namespace) -> int:
    from twinpool.cli.plan import plan_command

    return FINE if plan_command.plan(plan_command.PlanOptions.of(args), print_line, print_table) else REFUSED


def keys(args: argparse.Namespace) -> int:
    from twinpool.cli.tool_commands import list_keys, new_key, revoke_key

    if args.action == "list":
        print_table(list_keys(args.file))
        return FINE
    if not args.name:
        raise ConfigError(
            f"twinpool keys {args.action} needs {'a tenant' if args.action == 'new' else 'the id of a key'}"
        )
    if args.action == "new":
        print(new_key(args.file, args.name, args.expires))
    else:
        print(f"revoked {revoke_key(args.file, args.name)}")
    return FINE


def certs(args: argparse.Namespace) -> int:
    from twinpool.cli.certs_command import check_certificates, new_certificates, renew_certificate

    if args.action == "check":
        table, good = check_certificates(args.folder)
        print_table(table)
        return FINE if good else REFUSED
    make = new_certificates if args.action == "new" else renew_certificate
    for line in make(args.folder, args.host, args.days):
        print(line)
    return FINE


def demo(args: argparse.Namespace) -> int:
    from twinpool.cli.demo import demo_command

    if args.minutes < 0:
        raise ConfigError(f"--minutes must not be less than 0, got {args.minutes:g}")
    return demo_command.demo(demo_command.DemoOptions(args.chaos, args.minutes, args.port, args.seed))
