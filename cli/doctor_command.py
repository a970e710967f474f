"""`twinpool doctor`: examines a planned launch and this machine, and says what to do before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from twinpool.cluster.doctor.doctor_case import Finding, Severity

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 79
"""Characters of the line that is written over: a longer one would leave lines behind."""
_COLOURS = {Severity.FINE: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def as_json(findings: Sequence[Finding], code: int) -> str:
    """All findings, those that are fine too, in one line of JSON."""
    found: list[dict[str, Any]] = [
        {
            "check": one.check, "severity": str(one.severity), "found": one.found, "advice": one.advice,
            "detail": one.detail,
        }
        for one in findings
    ]  # fmt: skip
    return json.dumps({"exit_code": code, "findings": found})


def shown(findings: Sequence[Finding], *, everything: bool) -> RenderableType:
    """A line for each finding with its advice and detail below; `everything`: those that are fine, too."""
    from rich.console import Group
    from rich.text import Text

    lines = []
    for one in findings:
        if one.severity is Severity.FINE and not everything:
            continue
        line = Text.assemble(
            (f"{one.severity.upper():8}", _COLOURS[one.severity]), (f"{one.check}: ", "bold"), one.found
        )
        lines.append(line)
        if one.advice:
            lines.append(Text(f"        do: {one.advice}"))
        if one.detail:
            lines.append(Text(f"        why: {one.detail}", style="dim"))
    lines.append(Text(_ending(findings)))
    return Group(*lines)


SLOW_S = 1.0
"""Seconds from which on a check's time is said."""


class CheckProgress:
    """Says which checks are being made, on standard error: in a terminal in one line that is written over, else a line
    for each that was slow."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._live = out, out.isatty()
        self._under_way: list[str] = []
        self._made = 0

    def begins(self, check: str) -> None:
        self._under_way.append(check)
        self._show()

    def ended(self, check: str, seconds: float) -> None:
        self._under_way.remove(check)
        self._made += 1
        if seconds >= SLOW_S:
            self._clear()
            self._out.write(f"{check}: {seconds:.1f} s\n")
        self._show()

    def close(self) -> None:
        """Take the line away."""
        self._clear()
        self._out.flush()

    def _show(self) -> None:
        if self._live:
            self._clear()
            self._out.write(f"{self._made} checks made; now: {', '.join(self._under_way)}"[:WIDTH])
        self._out.flush()

    def _clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")


def _ending(findings: Sequence[Finding]) -> str:
    checks = len({one.check for one in findings})
    errors, warnings = (sum(one.severity is kind for one in findings) for kind in (Severity.ERROR, Severity.WARNING))
    if not errors and not warnings:
        return f"{checks} checks: nothing to do"
    verdict = "it would not serve" if errors else "it would serve"
    return f"{checks} checks: {errors} errors, {warnings} warnings; {verdict}"
