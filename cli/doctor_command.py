"""`twinpool doctor`: examines a planned launch and this machine, and says what to do before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cluster.doctor.finding import Finding, Severity

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def _ending(findings: Sequence[Finding]) -> str:
    checks = len({one.check for one in findings})
    errors, warnings = (sum(one.severity is kind for one in findings) for kind in (Severity.ERROR, Severity.WARNING))
    if not errors and not warnings:
        return f"{checks} checks: nothing to do"
    verdict = "it would not serve" if errors else "it would serve"
    return f"{checks} checks: {errors} errors, {warnings} warnings; {verdict}"
