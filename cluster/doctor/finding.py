"""Findings of the doctor: what a check saw, how bad that is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is. The values are words for people and for JSON."""

    FINE = "fine"
    """Nothing to do: it says what was seen, or why there was nothing to look at."""
    WARNING = "warning"
    """The cluster would start, and be worse than it could be, or end badly later."""
    ERROR = "error"
    """The cluster would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check saw."""

    severity: Severity
    found: str
    """What was seen, in a line."""
    advice: str = ""
    """What to do, in a line; empty where it is fine."""
    detail: str = ""
    """Why it matters, or the numbers behind it; may be empty."""
    check: str = ""
    """The check's name, which `examine` fills in."""


def fine(found: str) -> Finding:
    return Finding(Severity.FINE, found)


def warning(found: str, advice: str, detail: str = "") -> Finding:
    return Finding(Severity.WARNING, found, advice, detail)


def error(found: str, advice: str, detail: str = "") -> Finding:
    return Finding(Severity.ERROR, found, advice, detail)


def from_refusal(refusal: Exception) -> Finding:
    """An error in the words of a check that `serve` makes itself: they say what to do after a colon or semicolon."""
    text = " ".join(str(refusal).split()) or type(refusal).__name__
    cut = max(text.rfind("; "), text.rfind(": "))
    if cut <= 0:
        return error(text, "change what it names, and look again")
    return error(text[:cut], text[cut + 2 :])


def sized(nbytes: int) -> str:
    """Bytes for people, in MiB or GiB."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / 2**20:,.0f} MiB"
