"""Who could have been chosen for a request and at which cost, and who could not and why: for its record.

It is made of what the choice was made of, before the request is booked. The best few workers are named with what the
policy compares, and of those that could not be chosen only the first few of each reason: a choice among a thousand
workers is explained in a few lines, and costs the router little.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from twinpool.contracts.ids import Role
from twinpool.contracts.messages.request_record import (
    MAX_CANDIDATES,
    MAX_NAMED,
    PlacementChoice,
    RefusedWorkers,
    WorkerCandidate,
)
from twinpool.router.core.routing_policies import RoutingAsk, RoutingPolicy
from twinpool.router.state.able_workers import AbleWorkers
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerEntry


@dataclass(frozen=True, slots=True)
class Considered:
    """What one worker was chosen from."""

    role: Role
    able: AbleWorkers
    chosen: WorkerEntry
    ask: RoutingAsk
    peer: WorkerEntry | None = None
    """The prefill worker that is to hand the request over, of a choice among decode workers."""
    why: str = ""
    """Why it was chosen, where the policy's cost isn't the reason."""


def explained(seen: Considered, r: RoutedRequest, policy: RoutingPolicy) -> PlacementChoice:
    """The choice in words and numbers."""
    able, ask = seen.able, seen.ask
    prompts = seen.role is not Role.DECODE
    costs = np.asarray((policy.prefill_cost if prompts else policy.decode_cost)(able, ask), np.float64)
    best = np.argsort(costs, kind="stable")[:MAX_CANDIDATES]
    some = AbleWorkers(able.columns, able.at.take(best))
    loads, held = some.column("whole_load"), (ask.hits.held_of if prompts else ask.hits.device_of)(some)
    named = [
        WorkerCandidate(entry.record.name, round(cost, 3), here, load)
        for entry, cost, here, load in zip(some, costs.take(best).tolist(), held.tolist(), loads.tolist(), strict=True)
    ]
    return PlacementChoice(
        0.0,
        r.attempt,
        seen.role,
        seen.chosen.record.name,
        policy.prefill_unit if prompts else policy.decode_unit,
        tuple(named),
        len(able) - len(named),
        _refused(seen, r),
        seen.why,
    )


def _refused(seen: Considered, r: RoutedRequest) -> tuple[RefusedWorkers, ...]:
    """The workers of the role that could not be chosen, by reason."""
    able, columns = seen.able, seen.able.columns
    if len(able) == columns.count(seen.role):
        return ()
    found: dict[str, list[WorkerEntry]] = defaultdict(list)
    reasons = columns.refusals(seen.role, seen.ask.max_len, seen.ask.now)
    told = {at for places in reasons.values() for at in places} | set(able.at.tolist())
    for reason, places in reasons.items():
        found[reason] += [columns.entries[at] for at in places]
    for at, entry in enumerate(columns.entries):
        if entry.record.role is seen.role and at not in told:
            found[_left_out(entry, seen, r)].append(entry)
    return tuple(
        RefusedWorkers(reason, len(some), tuple(entry.record.name for entry in some[:MAX_NAMED]))
        for reason, some in found.items()
        if some
    )


def _left_out(entry: WorkerEntry, seen: Considered, r: RoutedRequest) -> str:
    """Why a worker that could take requests was left out of this choice."""
    if r.avoid.get(entry.key, 0.0) > seen.ask.now:
        return "avoided after it failed this request"
    if seen.peer is not None and (seen.peer.key, entry.key) in r.spoiled:
        return f"a hand-over from {seen.peer.record.name} to it has failed"
    if r.told and entry.numerics != r.numerics:
        return "of another numerics class than the one in which the answer began"
    if seen.peer is not None and entry.handover != seen.peer.handover:
        return f"{seen.peer.record.name} can't hand over to it: another hand-over class"
    if seen.role is Role.PREFILL:
        return "no decode worker that could take the request is of its hand-over class"
    return "it has no room for more prompts"
