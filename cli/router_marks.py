"""Routers by their rows: what tells them apart, and what is said of those that no command replaces.

A router that a supervisor keeps is replaced by it when the build or the settings change. One that somebody else has
started, on another host or this one, is left alone: `upgrade` and `apply` say which those are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinpool.cli.admin_client import AdminClient, RouterAway

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
