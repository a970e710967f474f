"""Which workers can go on with each other's requests, by their rows, and what is said of those whose requests nobody
takes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinpool.cli.drain_command import DrainProgress
from twinpool.contracts.messages.fingerprint import REMEDIES, Fingerprint, differing

SHOWN = 60
"""Characters of a part's value that are shown."""

Row = Mapping[str, Any]


def apart(one: Row, other: Row) -> tuple[str, ...]:
    """In which parts the fingerprints of two workers differ, so that neither goes on with the other's requests; none
    where a row has no fingerprint, as with a router of an older build."""
    mine, its = _fingerprint(one), _fingerprint(other)
    return differing(mine, its) if mine is not None and its is not None else ()


def _fingerprint(row: Row) -> Fingerprint | None:
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
