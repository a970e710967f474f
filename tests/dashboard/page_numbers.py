"""The numbers on the dashboard's page, as a browser shows them, beside those of `/metrics` and of the status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support.browser import Tab

TOTALS = {
    "requests_submitted": "twinpool_requests_submitted_total",
    "requests_ended": "twinpool_requests_ended_total",
    "requests_failed": "twinpool_requests_failed_total",
    "requests_cancelled": "twinpool_requests_cancelled_total",
    "generated_tokens": "twinpool_generated_tokens_total",
    "prompt_tokens_cached": "twinpool_prompt_tokens_cached_total",
    "replays": "twinpool_replays_total",
    "attempts_recomputed": "twinpool_attempts_recomputed_total",
    "handovers_damaged": "twinpool_handovers_damaged_total",
    "fallbacks": "twinpool_fallbacks_total",
    "refused_full": 'twinpool_requests_refused_total{reason="queue_full"}',
    "refused_early": 'twinpool_requests_refused_total{reason="late"}',
    "requests_shed": "twinpool_requests_shed_total",
    "client_disconnects": "twinpool_client_disconnects_total",
    "slow_clients": "twinpool_slow_clients_total",
    "migrated": 'twinpool_migrations_total{outcome="migrated"}',
}
"""Counters on the page, each with its metric."""
SCRIPT = """Object.fromEntries([...document.querySelectorAll("[data-number]")]
    .map((node) => [node.dataset.number, [node.dataset.value, node.textContent]]))"""


class Shown(NamedTuple):
    """One number on the page."""

    value: str
    """As it came in the frame."""
    text: str
    """As a reader sees it."""


def numbers(tab: Tab) -> dict[str, Shown]:
    return {name: Shown(*pair) for name, pair in tab.run(SCRIPT).items()}


def differences(
    tab: Tab, metrics: Mapping[str, float], status: Mapping[str, Mapping[str, Any]], *, many: bool = False
) -> list[str]:
    """A line for each number of the page that isn't that of `/metrics` or of the status. `many`: there are so many
    workers that their rows are in a table that is folded up, whose texts are looked at all the same."""
    shown, found = numbers(tab), list[str]()

    def check(name: str, wanted: float | str, text: str | None = None) -> None:
        one = shown.get(name)
        if one is None:
            found.append(f"{name} isn't on the page; it should be {wanted}")
        elif isinstance(wanted, str):
            if one.value != wanted or not one.text.startswith(wanted):
                found.append(f"{name}: {one} should be {wanted}")
        elif float(one.value or "nan") != wanted or one.text != (text or f"{wanted:,.0f}"):
            found.append(f"{name}: {one} should be {wanted}")

    for name, metric in TOTALS.items():
        check(f"totals.{name}", metrics[metric])
    for site in {name.removeprefix("damage.") for name in shown if name.startswith("damage.")}:
        mark = f'where="{site}"'
        check(
            f"damage.{site}",
            sum(v for k, v in metrics.items() if k.startswith("twinpool_state_damage_total{") and mark in k),
        )
    check("now.running", sum(row["running"] for row in status.values()))
    for name, row in status.items():
        check(f"{name}.state", row["state"])
        check(f"{name}.running", row["running"])
        check(f"{name}.waiting", row["waiting"])
        held, total = row["pages_total"] - row["pages_free"], row["pages_total"]
        one = shown.get(f"{name}.pages_free")
        if one is None or one.value != str(row["pages_free"]):
            found.append(f"{name}: {one} should be {row['pages_free']} pages free")
        elif not re.fullmatch(rf"{held:,} \+ [\d,]+ of {total:,}", one.text):
            found.append(f"{name}: {one} should be {held} of {total}")
    known = {name.partition(".")[0] for name in shown if re.match(r"\w+-\d+\.", name)}
    found += [f"{name} is on the page and not in the status" for name in known - set(status)]
    return found
