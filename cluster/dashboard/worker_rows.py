"""Workers, pools and links as the dashboard's frames have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from twinpool.cluster.dashboard.worker_rates import LinkRate, WorkerRates, WorkerSample
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.autoscaler_messages import AutoscalerView
from twinpool.contracts.messages.worker_status import CPU_SECONDS, GPU_UTILIZATION, WorkerView

MAX_LINKS = 256
"""Links that a frame names, the busiest ones."""
GONE = frozenset({"left", "dead"})
SERVING = frozenset({"ready", "draining"})
ROLE_ORDER = {Role.PREFILL: 0, Role.DECODE: 1}


def ordered(samples: Iterable[WorkerSample]) -> list[WorkerSample]:
    """Prefill first, then by name, ``decode-2`` before ``decode-10``."""
    return sorted(samples, key=lambda one: (ROLE_ORDER.get(one.view.record.role, 2), *_natural(one.view.record.name)))


def worker_row(view: WorkerView, rates: WorkerRates) -> dict[str, Any]:
    """One worker. Pages of the device are held by requests, kept by the prefix cache alone, or unused, and sum up to
    `pages.total`; rates are a second. `cpu`: how many processors it keeps busy, `gpu`:
    its GPU's utilization from 0 to 1, each where that is known."""
    status, record = view.status, view.record
    counters, lately = status.counters, rates.of(record.name, record.incarnation)
    held = status.pages_total - status.pages_free
    unused = min(status.pages_free, int(counters.get("device_pages_unused", status.pages_free)))
    row: dict[str, Any] = {
        "name": record.name,
        "role": record.role,
        "state": status.state,
        "incarnation": record.incarnation,
        "node": record.node,
        "build": record.build,
        "plane": status.plane,
        "running": status.running,
        "waiting": status.waiting,
        "outgoing": status.outgoing,
        "prompt_tokens": status.prompt_tokens,
        "pages": {
            "total": status.pages_total,
            "requests": held,
            "cached": status.pages_free - unused,
            "unused": unused,
        },
        "tokens_s": round(lately.get("tokens_generated", 0.0), 1),
        "prompt_tokens_s": round(lately.get("prompt_tokens_computed", 0.0), 1),
        "stalled_s": round(status.stalled_s, 1),
        "last_end": status.last_end[:200],
        "waits": status.waits[:200],
        "cordoned": view.cordoned,
    }
    if "host_pages_total" in counters:
        used, swapped = int(counters.get("host_pages_used", 0)), int(counters.get("host_pages_swapped", 0))
        row["host"] = {
            "total": int(counters["host_pages_total"]),
            "swapped": swapped,
            "cached": max(0, used - swapped),
        }
    if CPU_SECONDS in lately:
        row["cpu"] = round(lately[CPU_SECONDS], 2)
    if GPU_UTILIZATION in counters:
        row["gpu"] = round(counters[GPU_UTILIZATION], 2)
    for name in ("retracted", "ungranted", "kept_answers"):
        if counters.get(name):
            row[name] = int(counters[name])
    return row


def pool_rows(rows: Sequence[dict[str, Any]], autoscaler: AutoscalerView | None) -> list[dict[str, Any]]:
    """The pools that there are, each with how many of its workers are in which state, and what the autoscaler says."""
    sizing = {pool.role: pool for pool in autoscaler.pools} if autoscaler is not None else {}
    pools = []
    for role in dict.fromkeys([row["role"] for row in rows]):
        own = [row for row in rows if row["role"] == role]
        live = [row for row in own if row["state"] in SERVING]
        pool: dict[str, Any] = {
            "role": role,
            "states": {state: sum(row["state"] == state for row in own) for state in sorted({r["state"] for r in own})},
            "running": sum(row["running"] for row in live),
            "waiting": sum(row["waiting"] for row in live),
            "pages_total": sum(row["pages"]["total"] for row in live),
            "pages_requests": sum(row["pages"]["requests"] for row in live),
        }
        if (one := sizing.get(role)) is not None:
            pool |= {"wanted": one.wanted, "least": one.least, "most": one.most, "why": one.why}
            pool["need"] = round(one.need, 2) if one.need >= 0 else None
        pools.append(pool)
    return pools


def link_rows(links: Sequence[LinkRate]) -> tuple[list[list[Any]], int]:
    """The busiest links as sender, receiver, bytes a second and bytes since the sender's start; and how many more there
    are."""
    rows = [[link.sender, link.receiver, round(link.bytes_s), int(link.total)] for link in links[:MAX_LINKS]]
    return rows, max(0, len(links) - MAX_LINKS)


def _natural(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)
