"""Operators' endpoints by which workers go: drain, undrain, and change of role, of a worker or of a whole node.

    POST /cluster/drain/NAME            stop its admission; it leaves when its work is done or handed on
    POST /cluster/drain/NAME?now=true   of one that drains: start over elsewhere whatever it still has
    POST /cluster/undrain/NAME          admit again; what has left is started again
    POST /cluster/role/NAME?role=ROLE   drain it, and have it started in the other pool

NAME is a worker's, or a node's: its host name or its Ray node id. `force=true` drains even the last worker of a role.

A drain is a state of the worker, and of the controller: nothing of it is kept here, so a router that is started again
has lost nothing, and whoever asks again finds it under way. Of a node the controller hears first: it cordons it, so
that no worker lands there. Then each worker is told directly, and one that can't be reached from here by the
controller, with its next heartbeat. What became of each is in its row's ``outcome``; one that can't be reached hides no
other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, unquote

from contracts.errors import RequestError
from contracts.ids import Role
from contracts.messages.worker_status import WorkerStatus
from router.api.admin_status import STATUS_DEADLINE_S, forbidden, natural, status_line, unknown_as_yet
from router.api.asgi_exchange import HttpExchange
from router.openai.api_errors import ApiError
from router.service.router_service import RouterService
from router.state.worker_table import GONE, WorkerEntry

ANSWER_DEADLINE_S = STATUS_DEADLINE_S + 4.0
NODE_ID_CHARS = 8
"""So much of a Ray node id is enough to name it."""


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """What an operator has named."""

    name: str
    is_node: bool
    entries: tuple[WorkerEntry, ...]
    """The worker, or all of the node, in whatever state; empty for a node that only the controller may know."""

    def in_state(self, *states: str) -> list[WorkerEntry]:
        return [entry for entry in self.entries if entry.status.state in states]


async def drain(service: RouterService, exchange: HttpExchange) -> None:
    """Stop admission; refused where nobody of a role would be left, unless ``force``."""
    target = _find(service, exchange, _name(exchange, "/cluster/drain/"))
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    if _asked(exchange, "now"):
        return await _hurry(service, exchange, target)
    if failure := _undrainable(service, target, force=_asked(exchange, "force")):
        return await exchange.fail(failure)
    ready = target.in_state("ready")
    under_way = [_line(e.status, "drains already") for e in target.in_state("draining")]
    under_way += [_line(e.status, "is started elsewhere") for e in target.in_state("starting")]
    for entry in ready:  # Before they have answered: another operator may ask for the others meanwhile.
        entry.request_drain(service.clock.now())
    if target.is_node and isinstance(refusal := await _ask_controller(service, target, drain=True), ApiError):
        for entry in ready:
            entry.cancel_drain()
        return await exchange.fail(refusal)
    lines = await _tell(service, ready, drain=True)
    failed, unheard = [line for line in lines if line["state"] == "unreachable"], ""
    if failed and not target.is_node:
        # Only then: an order that is under way by heartbeat could overtake an undrain that comes soon after.
        answer = await _ask_controller(service, target, drain=True)
        unheard = answer.message if isinstance(answer, ApiError) else answer
    for line in [] if unheard else failed:
        line["outcome"] += "; the controller tells it with its next heartbeat"
    await _answer(exchange, target, lines + under_way, unheard)


def _undrainable(service: RouterService, target: DrainTarget, *, force: bool) -> ApiError | None:
    """Why it can't be drained, if so."""
    ready = target.in_state("ready")
    if not ready and not target.is_node and not target.in_state("draining"):
        return _conflict(f"{target.name} is {target.entries[0].status.state}: only a ready worker can be drained")
    for role in {e.record.role for e in ready}:
        left = [e for e in service.core.workers.staying(role, service.clock.now()) if e not in ready]
        if not left and not force:
            those = ready[0].record.name if len(ready) == 1 else target.name
            return _conflict(f"{those} is the last {role} worker that serves; drain it with --force (force=true)")
    return None


async def _hurry(service: RouterService, exchange: HttpExchange, target: DrainTarget) -> None:
    """What is left at draining workers starts over elsewhere; what nobody else can take stays."""
    draining = target.in_state("draining")
    if not draining:
        return await exchange.fail(_conflict(f"{target.name} is not draining: drain it first"))
    taken = sum(service.fail_over(e.key) for e in draining)
    kept = sum(len(e.requests) for e in draining)
    await exchange.answer_json(200, {"taken": taken, "kept": kept})


async def undrain(service: RouterService, exchange: HttpExchange) -> None:
    """Let draining workers admit again, have those started that had left, and let workers land on the node."""
    target = _find(service, exchange, _name(exchange, "/cluster/undrain/"))
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    now = service.clock.now()
    draining = target.in_state("draining") + [e for e in target.in_state("ready") if e.drains or now < e.leaves_until]
    gone = target.in_state(*GONE)
    if not draining and not gone and not target.is_node:
        return await exchange.fail(_conflict(f"{target.name} is not draining; it is {target.entries[0].status.state}"))
    lines = [_line(e.status, "starts again") for e in gone]
    unheard = await _ask_controller(service, target, drain=False)
    if isinstance(unheard, ApiError):
        return await exchange.fail(unheard)
    for entry in draining:
        entry.cancel_drain()
    lines += await _tell(service, draining, drain=False)
    # Unlike a drain, this can't come by heartbeat: the worker itself must hear it before it has left.
    await _answer(exchange, target, lines, "" if target.is_node else "it goes on draining")


async def _ask_controller(service: RouterService, target: DrainTarget, *, drain: bool) -> str | ApiError:
    """Tell the controller; empty, or why it has not heard, or the failure where that can't be."""
    directory = service.worker_links.directory
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await (directory.drain(target.name) if drain else directory.undrain(target.name))
    except RequestError as error:
        if target.entries:
            return _conflict(str(error))
        message = f"{error}; workers: {_known(service)}"
        return ApiError(404, message, "invalid_request_error", "unknown")
    except (OSError, TimeoutError) as error:
        reason = f"the controller can't be reached: {str(error) or 'no answer in time'}"
        if target.is_node or target.in_state(*GONE):
            return ApiError(503, reason, "server_error", "down")
        return reason
    return ""


async def _answer(exchange: HttpExchange, target: DrainTarget, lines: Sequence[dict[str, Any]], hopeless: str) -> None:
    """A line for each worker; a failure where one can't be reached and, as `hopeless` says, won't be."""
    failed = [line for line in lines if line["state"] == "unreachable"]
    if failed and hopeless:
        message = f"{target.name} {failed[0]['outcome']}; {hopeless}"
        return await exchange.fail(ApiError(503, message, "server_error", "unreachable"))
    ordered = sorted(lines, key=lambda line: natural(line["name"]))
    one = ordered[0] if ordered and not target.is_node else {"node": target.name}
    await exchange.answer_json(200, {**one, "target": target.name, "is_node": target.is_node, "workers": ordered})


async def role(service: RouterService, exchange: HttpExchange) -> None:
    """Drain a worker, and have it started again in the other pool."""
    name = _name(exchange, "/cluster/role/")
    target = _find(service, exchange, name, nodes=False)
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    (entry,) = target.entries
    wanted = parse_qs(exchange.query.decode("latin-1")).get("role", [""])[-1]
    if wanted not in list(Role):
        return await exchange.fail(_conflict(f"role must be {' or '.join(Role)}, got {wanted!r}"))
    if entry.record.role == wanted:
        return await exchange.fail(_conflict(f"{name} is a {wanted} worker already"))
    if entry.status.state != "ready":
        return await exchange.fail(_conflict(f"{name} is {entry.status.state}: only a ready worker changes its role"))
    if failure := _undrainable(service, target, force=_asked(exchange, "force")):
        return await exchange.fail(failure)
    entry.request_drain(service.clock.now())
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await service.worker_links.directory.change_role(entry.record.name, Role(wanted))
    except RequestError as error:
        entry.cancel_drain()
        return await exchange.fail(_conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        return await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    await exchange.answer_json(200, {"name": name, "role": wanted, "incarnation": entry.record.incarnation})


def _name(exchange: HttpExchange, before: str) -> str:
    return unquote(exchange.path.removeprefix(before))


def _asked(exchange: HttpExchange, flag: str) -> bool:
    return parse_qs(exchange.query.decode("latin-1")).get(flag, ["false"])[-1].lower() in ("1", "true", "yes")


def _find(service: RouterService, exchange: HttpExchange, name: str, *, nodes: bool = True) -> DrainTarget | ApiError:
    """The worker of that name, or the node with all that is known to be on it."""
    if failure := forbidden(exchange) or unknown_as_yet(service):
        return failure
    workers = service.core.workers
    entry = workers.named(name)
    if entry is not None:
        return DrainTarget(name, False, (entry,))
    if nodes and name:
        # Of a node without workers only the controller knows, which refuses those that it doesn't.
        return DrainTarget(name, True, tuple(e for e in workers if _is_node(e, name)))
    message = f"no worker is named {name!r}; there are: {_known(service)}"
    return ApiError(404, message, "invalid_request_error", "unknown")


def _known(service: RouterService) -> str:
    return ", ".join(sorted((str(e.record.name) for e in service.core.workers), key=natural)) or "none"


def _is_node(entry: WorkerEntry, name: str) -> bool:
    record = entry.record
    return record.node == name or (len(name) >= NODE_ID_CHARS and record.node_id.startswith(name))


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, "invalid_request_error", "conflict")


async def _tell(service: RouterService, entries: Sequence[WorkerEntry], *, drain: bool) -> list[dict[str, Any]]:
    """Tell all of them at once; a line for each, also for those that can't be reached."""
    answers = await asyncio.gather(*(_tell_one(service, entry, drain=drain) for entry in entries))
    lines = []
    for entry, answer in zip(entries, answers, strict=True):
        if isinstance(answer, str):
            lines.append(_line(replace(entry.status, state="unreachable"), f"can't be reached: {answer}"))
            continue
        service.core.on_status(answer)
        entry.drains = drain
        lines.append(_line(answer, "drains" if drain else "admits again"))
    return lines


def _line(status: WorkerStatus, outcome: str) -> dict[str, Any]:
    return status_line(status) | {"outcome": outcome}


async def _tell_one(service: RouterService, target: WorkerEntry, *, drain: bool) -> WorkerStatus | str:
    """The worker's status afterwards, or why it can't be had."""
    port = service.worker_links.port(target.key)
    if port is None:
        return "there is no link to it"
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await (port.drain() if drain else port.undrain())
    except (OSError, TimeoutError) as error:
        return str(error) or "no answer in time"
