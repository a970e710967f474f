"""What the rows of routers and workers say to commands: which routers no command replaces, and which workers can go on
with each other's requests.

A router that a supervisor keeps is replaced by it when the build or the settings change. One that somebody else has
started, on another host or this one, is left alone: `upgrade` and `apply` say which those are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinpool.cli.admin_client import AdminClient, RouterAway
from twinpool.cli.operator.drain_command import DrainProgress

if TYPE_CHECKING:
    from twinpool.contracts.messages.fingerprint import Fingerprint

Row = Mapping[str, Any]
HOW = (
    "Replace each where it was started: start one of the new build and settings with --take-over SOCKET, which is the "
    "--handover-socket of the one before, or end it (SIGTERM) and start it anew"
)


def described(row: Row) -> str:
    """A router's name, where it is and its marks."""
    settings = f", settings {row['settings']}" if row.get("settings") else ""
    where = f"{row.get('address') or '?'} on {row['node']}"
    return f"{row.get('name') or 'a router'} at {where} (build {row['build']}{settings})"


def wanted_marks(rows: Sequence[Row]) -> tuple[str, str]:
    """Build and settings that a cluster's routers are to have: those of the routers that its supervisor keeps, else
    those that most have; both empty without routers."""
    marks = [(str(row["build"]), str(row.get("settings") or "")) for row in rows if row.get("kept")]
    marks = marks or [(str(row["build"]), str(row.get("settings") or "")) for row in rows]
    return Counter(marks).most_common(1)[0][0] if marks else ("", "")


def router_lines(rows: Sequence[Row]) -> list[str]:
    """What `status` says of routers: a line for each where there are several of unlike marks, or some that nobody
    keeps."""
    build, settings = wanted_marks(rows)
    alike = all((row["build"], row.get("settings") or "") == (build, settings) for row in rows)
    if alike and all(row.get("kept") for row in rows):
        return []
    return [f"router {described(row)}{_troubles(row, build, settings)}" for row in rows]


def _troubles(row: Row, build: str, settings: str) -> str:
    differs = [what for what, wanted in (("build", build), ("settings", settings)) if (row.get(what) or "") != wanted]
    found = f": another {' and other '.join(differs)} than the others" if differs else ""
    return found if row.get("kept") else f"{found}; not kept by serve: upgrade and apply don't replace it"


def left_alone(rows: Iterable[Row], what: str, wanted: str) -> str:
    """What is said of routers that nobody keeps and that have another `what` (``build`` or ``settings``) than `wanted`;
    empty where there are none."""
    others = [row for row in rows if not row.get("kept") and row.get(what) and row[what] != wanted]
    if not others:
        return ""
    return f"not replaced, since serve doesn't keep them: {'; '.join(map(described, others))}. {HOW}"


def routers_of(operator: AdminClient) -> list[Row]:
    """The rows of routers; none where the router that answers, or the controller, doesn't tell."""
    try:
        return list(operator.status().get("routers", []))
    except RouterAway:
        return []


SHOWN = 60
"""Characters of a part's value that are shown."""


def apart(one: Row, other: Row) -> tuple[str, ...]:
    """In which parts the fingerprints of two workers differ, so that neither goes on with the other's requests; none
    where a row has no fingerprint, as with a router of an older build."""
    from twinpool.contracts.messages.fingerprint import differing

    mine, its = _fingerprint(one), _fingerprint(other)
    return differing(mine, its) if mine is not None and its is not None else ()


def _fingerprint(row: Row) -> Fingerprint | None:
    from twinpool.contracts.messages.fingerprint import REMEDIES, Fingerprint

    told = row.get("fingerprint")
    return Fingerprint(**{part: told[part] for part in REMEDIES}) if told else None


def alone(row: Row, rows: Iterable[Row]) -> tuple[str, ...]:
    """In which parts a worker differs from those of its role that serve, where it differs from all of them; none where
    one of them can go on with its requests, or none serves."""
    others = [
        one for one in rows if one["role"] == row["role"] and one["state"] == "ready" and one["name"] != row["name"]
    ]
    differ = [apart(row, one) for one in others]
    return differ[0] if differ and all(differ) else ()


def between_builds(rows: Sequence[Row], build: str) -> str:
    """In what the workers of `build` and those of another one differ, in words; empty where they don't, or where not
    both serve."""
    here = [row for row in rows if row.get("build") == build and row.get("fingerprint")]
    there = [row for row in rows if row.get("build") not in (build, None, "") and row.get("fingerprint")]
    if not here or not there or not (parts := apart(there[0], here[0])):
        return ""
    return ", ".join(part if part == "numerics" else f"{part} {_change(there[0], here[0], part)}" for part in parts)


def _change(before: Row, after: Row, part: str) -> str:
    return f"{str(before['fingerprint'][part])[:SHOWN]} -> {str(after['fingerprint'][part])[:SHOWN]}"


def draining(row: Row, rows: Iterable[Row]) -> str:
    """What a worker that drains waits for, and why nobody takes it over if that is so, in words."""
    waits = DrainProgress.of(row, None, here=True).waits_for
    if row["running"] and (parts := alone(row, rows)):
        return (
            f"{row['name']} drains and waits for {waits}: none of the {row['role']} workers that serve can go on with "
            f"them (they differ in {' and '.join(parts)}), so they end where they are"
        )
    return f"{row['name']} drains and waits for {waits}"
