"""The brain's books, recounted from the requests themselves."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.ids import RequestId, Role
from router.moves import Moves
from router.request import Phase, Request
from router.workers import WorkerKey, Workers


def recount(
    requests: Mapping[RequestId, Request],
    waiting: Mapping[RequestId, Request],
    held: Mapping[RequestId, Request],
    workers: Workers,
    moves: Moves,
) -> list[str]:
    """What doesn't agree: queues with phases, loads and members of workers with the requests that name them.

    `waiting` are those in the queue, `held` those that wait for a report; a request that moves is booked at both ends.
    """
    found: list[str] = []
    prefill_load: dict[WorkerKey, int] = {}
    decode_load: dict[WorkerKey, int] = {}
    members: dict[WorkerKey, set[RequestId]] = {}
    for rid, r in requests.items():
        if (r.phase is Phase.WAITING) != (rid in waiting):
            found.append(f"request {rid} is {r.phase} but {'in' if rid in waiting else 'not in'} the queue")
        if r.phase is Phase.ENDED:
            found.append(f"request {rid} has ended and is still held")
        if r.prefill:
            prefill_load[r.prefill] = prefill_load.get(r.prefill, 0) + r.prefill_loaded
            members.setdefault(r.prefill, set()).add(rid)
        move = moves.of(r)
        for key in [k for k in (r.decode, move.target if move else None) if k]:
            decode_load[key] = decode_load.get(key, 0) + 1
            members.setdefault(key, set()).add(rid)
    for entry in workers:
        if entry.breaker.probe is not None and entry.breaker.probe not in entry.requests:
            found.append(f"{entry.record.name}: its breaker waits for a request that it doesn't have")
        want = (prefill_load if entry.record.role is Role.PREFILL else decode_load).get(entry.key, 0)
        if entry.load != want:
            found.append(f"{entry.record.name}: load is booked as {entry.load}, requests add up to {want}")
        if entry.requests != members.pop(entry.key, set()):
            found.append(f"{entry.record.name}: booked requests differ from the requests that name it")
    found += [f"requests name {name} #{inc}, which is not in the table" for name, inc in members]
    found += [f"{rid} is queued but not in the house" for rid in waiting if rid not in requests]
    found += [f"{rid} is held but not in the house" for rid in held if rid not in requests]
    return found
