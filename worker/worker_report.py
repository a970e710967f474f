"""The reports of a worker of either role on itself: its status, and the violations that `check` found."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.contracts.damage import PREFIX, DamageSite
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus
from twinpool.worker.nonfinite_rows import NonfiniteRows
from twinpool.worker.request_table import RequestTable


class WorkerReport:
    """Makes both reports from what is the same for both roles; the caller passes the rest."""

    def __init__(
        self,
        name: WorkerName,
        role: Role,
        incarnation: Incarnation,
        requests: RequestTable[Any],
        fitness: NonfiniteRows,
        manager: KVCacheManager,
        plane: str,
    ) -> None:
        """`plane`: the name of its data plane."""
        self._name, self._role, self._incarnation, self._plane = name, role, incarnation, plane
        self._requests, self._fitness, self._manager = requests, fitness, manager
        self._pages = manager.pools.allocators[manager.full]

    def status(
        self,
        *,
        running: int,
        steps: int,
        outgoing: int,
        counters: Mapping[str, float],
        prompt_tokens: int = 0,
        ungranted: int = 0,
    ) -> WorkerStatus:
        """Return the status. `running`: how many requests run, the others wait. `outgoing`: open rooms in which this
        worker is the sender. `prompt_tokens`: of its prompts that are still to be computed. `ungranted`: requests that
        wait for pages."""
        return WorkerStatus(
            name=self._name,
            role=self._role,
            state="draining" if self._requests.draining else "ready",
            pid=os.getpid(),
            node=platform.node(),
            incarnation=self._incarnation,
            running=running,
            waiting=len(self._requests) - running,
            pages_total=self._pages.total,
            pages_free=self._manager.supply.free_pages(self._manager.full),
            steps=steps,
            outgoing=outgoing,
            counters={
                **counters,
                **self._manager.stats(),
                f"{PREFIX}{DamageSite.LOGITS}": self._fitness.rows,
            },
            plane=self._plane,
            kv_events=self._manager.tiers.events.endpoint,
            kv_replay=self._manager.tiers.events.replay_endpoint,
            prompt_tokens=prompt_tokens,
            ungranted=ungranted,
        )

    def check(self, found: Sequence[str], allocations: int, *, rooms: int, slots: int = 0) -> CheckReport:
        """Return the report: `found`, and whether `allocations` differs from what the KV cache manager counts.

        `allocations`: how many the worker's requests, and whatever else it does, hold. `slots`: its metadata slots.
        """
        booked, known = list(found), len(self._manager.table)
        if allocations != known:
            booked.append(f"{known} allocations, requests hold {allocations}")
        return CheckReport(self._name, self._pages.total, slots, self._pages.leases, rooms, tuple(booked))
