"""Operators' endpoints by which workers go: drain, undrain, and change of role, of a worker or of a whole node.

    POST /cluster/drain/NAME            stop its admission; it leaves when its work is done or handed on
    POST /cluster/drain/NAME?now=true   of one that drains: start over elsewhere whatever it still has
    POST /cluster/undrain/NAME          admit again, until it has left
    POST /cluster/role/NAME?role=ROLE   drain it, and have it started in the other pool

NAME is a worker's, or a node's: its host name or its Ray node id. `force=true` drains even the last worker of a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

from contracts.errors import RequestError
from contracts.ids import Role
from contracts.messages import WorkerStatus
from router.admin import STATUS_DEADLINE_S, forbidden, natural, status_line
from router.failures import Failure
from router.service import RouterService
from router.web import Exchange
from router.workers import GONE, Entry

ANSWER_DEADLINE_S = STATUS_DEADLINE_S + 4.0
NODE_ID_CHARS = 8
"""So much of a Ray node id is enough to name it."""


async def drain(service: RouterService, exchange: Exchange) -> None:
    """Stop admission; refused where nobody of a role would be left, unless ``force``."""
    name = _name(exchange, "/cluster/drain/")
    entries = _find(service, exchange, name)
    if isinstance(entries, Failure):
        return await exchange.fail(entries)
    if _asked(exchange, "now"):
        return await _hurry(service, exchange, name, entries)
    if failure := _undrainable(service, name, entries, force=_asked(exchange, "force")):
        return await exchange.fail(failure)
    ready = [e for e in entries if e.status.state == "ready"]
    for entry in ready:  # Before they have answered: another operator may ask for the others meanwhile.
        entry.tell_to_leave(service.clock.now())
    await _tell(service, exchange, name, ready, drain=True)


def _undrainable(service: RouterService, name: str, entries: Sequence[Entry], *, force: bool) -> Failure | None:
    """Why these can't be drained, if so."""
    ready = [e for e in entries if e.status.state == "ready"]
    if not ready:
        states = {e.status.state for e in entries}
        if states == {"draining"}:
            return _conflict(f"{name} is draining already")
        return _conflict(f"{name} is {' and '.join(sorted(states))}: only a ready worker can be drained")
    for role in {e.record.role for e in ready}:
        left = [e for e in service.brain.workers.staying(role, service.clock.now()) if e not in ready]
        if not left and not force:
            those = ready[0].record.name if len(ready) == 1 else name
            return _conflict(f"{those} is the last {role} worker that serves; drain it with --force (force=true)")
    return None


async def _hurry(service: RouterService, exchange: Exchange, name: str, entries: Sequence[Entry]) -> None:
    """What is left at draining workers starts over elsewhere; what nobody else can take stays."""
    draining = [e for e in entries if e.status.state == "draining"]
    if not draining:
        return await exchange.fail(_conflict(f"{name} is not draining: drain it first"))
    taken = sum(service.fail_over(e.key) for e in draining)
    kept = sum(len(e.requests) for e in draining)
    await exchange.answer_json(200, {"taken": taken, "kept": kept})


async def undrain(service: RouterService, exchange: Exchange) -> None:
    """Let draining workers admit again, until they have left."""
    name = _name(exchange, "/cluster/undrain/")
    entries = _find(service, exchange, name)
    if isinstance(entries, Failure):
        return await exchange.fail(entries)
    draining = [e for e in entries if e.status.state == "draining" or (e.drains and e.status.state == "ready")]
    if not draining:
        states = " and ".join(sorted({e.status.state for e in entries}))
        gone = {"left": f"{name} has left", "dead": f"{name} is dead"}
        return await exchange.fail(_conflict(gone.get(states, f"{name} is not draining; it is {states}")))
    for entry in draining:
        entry.tell_to_stay()
    await _tell(service, exchange, name, draining, drain=False)


async def role(service: RouterService, exchange: Exchange) -> None:
    """Drain a worker, and have it started again in the other pool."""
    name = _name(exchange, "/cluster/role/")
    entries = _find(service, exchange, name, nodes=False)
    if isinstance(entries, Failure):
        return await exchange.fail(entries)
    (entry,) = entries
    wanted = parse_qs(exchange.query.decode("latin-1")).get("role", [""])[-1]
    if wanted not in list(Role):
        return await exchange.fail(_conflict(f"role must be {' or '.join(Role)}, got {wanted!r}"))
    if entry.record.role == wanted:
        return await exchange.fail(_conflict(f"{name} is a {wanted} worker already"))
    if failure := _undrainable(service, name, entries, force=_asked(exchange, "force")):
        return await exchange.fail(failure)
    entry.tell_to_leave(service.clock.now())
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await service.fleet.directory.change_role(entry.record.name, Role(wanted))
    except RequestError as error:
        entry.tell_to_stay()
        return await exchange.fail(_conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        return await exchange.fail(Failure(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    await exchange.answer_json(200, {"name": name, "role": wanted, "incarnation": entry.record.incarnation})


def _name(exchange: Exchange, before: str) -> str:
    return unquote(exchange.path.removeprefix(before))


def _asked(exchange: Exchange, flag: str) -> bool:
    return parse_qs(exchange.query.decode("latin-1")).get(flag, ["false"])[-1].lower() in ("1", "true", "yes")


def _find(service: RouterService, exchange: Exchange, name: str, *, nodes: bool = True) -> list[Entry] | Failure:
    """The worker of that name, or those of the node that are not gone."""
    if failure := forbidden(exchange):
        return failure
    workers = service.brain.workers
    entry = workers.named(name)
    if entry is not None:
        return [entry]
    of_node = [e for e in workers if nodes and name and _is_node(e, name) and e.status.state not in GONE]
    if of_node:
        return of_node
    known = ", ".join(sorted((str(e.record.name) for e in workers), key=natural)) or "none"
    hosts = ", ".join(sorted({e.record.node for e in workers if e.record.node}))
    more = f"; nodes: {hosts}" if nodes and hosts else ""
    what = "worker or node" if nodes else "worker"
    return Failure(404, f"no {what} is named {name!r}; there are: {known}{more}", "invalid_request_error", "unknown")


def _is_node(entry: Entry, name: str) -> bool:
    record = entry.record
    return record.node == name or (len(name) >= NODE_ID_CHARS and record.node_id.startswith(name))


def _conflict(message: str) -> Failure:
    return Failure(409, message, "invalid_request_error", "conflict")


async def _tell(
    service: RouterService, exchange: Exchange, name: str, targets: Sequence[Entry], *, drain: bool
) -> None:
    """All of them at once; each that answered counts, also where another didn't."""
    answers = await asyncio.gather(*(_tell_one(service, target, drain=drain) for target in targets))
    lines: list[dict[str, Any]] = []
    for target, answer in zip(targets, answers, strict=True):
        if isinstance(answer, str):
            message = f"{target.record.name} can't be reached: {answer}"
            return await exchange.fail(Failure(503, message, "server_error", "unreachable"))
        service.brain.on_status(answer)
        target.drains = drain
        lines.append(status_line(answer))
    one = lines[0] if len(lines) == 1 and lines[0]["name"] == name else {"node": name}
    await exchange.answer_json(200, {**one, "workers": lines})


async def _tell_one(service: RouterService, target: Entry, *, drain: bool) -> WorkerStatus | str:
    """The worker's status afterwards, or why it can't be had."""
    port = service.fleet.port(target.key)
    if port is None:
        return f"{target.record.name} has no link"
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await (port.drain() if drain else port.undrain())
    except (OSError, TimeoutError) as error:
        return str(error) or "no answer in time"
