"""Operators' endpoints that change the cluster: its workers, its pools, its settings.

Workers are taken out of service, and change their roles:

    POST /cluster/drain/NAME            stop admission; a worker leaves when its requests have ended or migrated
    POST /cluster/drain/NAME?now=true   start the requests that draining workers still have over on other workers
    POST /cluster/undrain/NAME          admit again; workers that have left are started again
    POST /cluster/role/NAME?role=ROLE   drain a worker, and have it started in the other pool of workers

NAME is the name of a worker, or a node's host name or Ray node id; only a worker can change its role. With `force=true`
even the last worker of a role is drained.

A drain is state of the worker and of the controller, and no state of this router: a router that is restarted has lost
nothing, and an operator who asks again finds the drain under way. For a node the controller is told first; it cordons
the node, so that no worker is placed there. Then the router tells each worker directly. A worker that the router can't
reach is told by the controller, with its next heartbeat. The answer has a row for each worker, with its ``outcome``,
also when one of them can't be reached.

Pools get more workers, fewer, or the same again, and nodes are cordoned:

    POST /cluster/add?role=ROLE&count=N&node=NODE     start N workers more (1 without `count`), on NODE or anywhere
    POST /cluster/scale?prefill=N&decode=M            bring pools to so many workers, by starts and by drains
    POST /cluster/restart/WORKER                      drain a worker, and start it again as its next incarnation
    POST /cluster/cordon/NODE, /cluster/uncordon/NODE place no worker there any more; those that serve go on

The controller decides and carries out; this router passes the order on and answers with the workers concerned, each
with its ``outcome``. Workers that are told to leave hear it with their next heartbeat and leave by drain.

Settings of the whole cluster change:

    POST /cluster/apply?dry_run=true      with JSON: sections of keys, as in a configuration file

The supervisor has the settings and decides; this router passes the change on by the controller. It answers with the
settings that were changed, or would be, each with the roles whose workers take it up when they start and the services
that are replaced for it; the digest of the settings that a worker of each role is started with from now on
(`/cluster/status` says which each was started with); and how many routers and controllers are behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from msgspec.structs import replace

from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.messages.pool_changes import (
    MAX_SETTINGS_BYTES,
    AddWorkers,
    ChangedWorkers,
    CordonNode,
    DrainWorkers,
    PoolChange,
    RestartWorker,
    ScalePools,
    SetRole,
    SettingsAnswer,
    SettingsChange,
    UncordonNode,
    UndrainWorkers,
)
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.outside_data import read_json
from twinpool.router.api.admin_status import STATUS_DEADLINE_S, natural, status_line, unknown_as_yet
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.worker_table import GONE, WorkerEntry

ANSWER_DEADLINE_S = STATUS_DEADLINE_S + 4.0
"""How long the controller, or a worker, may take to answer an order."""
NODE_ID_CHARS = 8
"""A Ray node id may be given by its first characters, if there are at least so many."""


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """The worker or node that an operator has named."""

    name: str
    is_node: bool
    entries: tuple[WorkerEntry, ...]
    """The worker, or all workers of the node, in any state; empty for a node that only the controller may know."""

    def in_state(self, *states: str) -> list[WorkerEntry]:
        return [entry for entry in self.entries if entry.status.state in states]


async def drain(service: RouterService, exchange: HttpExchange) -> None:
    """As `_drain`, after the orders that are under way."""
    async with service.orders:
        await _drain(service, exchange)


async def _drain(service: RouterService, exchange: HttpExchange) -> None:
    """Stop the admission of a worker or of all workers of a node.

    Answers 409 where a role would be left without a worker, unless ``force``. With ``now`` it starts requests over.
    """
    target = find_target(service, name_after(exchange, "/cluster/drain/"))
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    if asked(exchange, "now"):
        return await _fail_over_now(service, exchange, target)
    if failure := undrainable(service, target, force=asked(exchange, "force")):
        return await exchange.fail(failure)
    ready = target.in_state("ready")
    under_way = [_line(e.status, "drains already") for e in target.in_state("draining")]
    under_way += [_line(e.status, "is started elsewhere") for e in target.in_state("starting")]
    for entry in ready:  # Before the workers answer: meanwhile another operator may drain the others of the role.
        entry.request_drain(service.clock.now())
    # The controller knows what other routers have ordered; without it the workers hear of the order all the same.
    keep = () if asked(exchange, "force") else service.core.workers.needed
    unheard = await _ask_controller(service, target, DrainWorkers(target.name, tuple(keep)))
    if isinstance(unheard, ApiError):
        for entry in ready:
            entry.cancel_drain()
        return await exchange.fail(unheard)
    lines = await _tell(service, ready, drain=True)
    for line in [line for line in lines if line["state"] == "unreachable" and not unheard]:
        line["outcome"] += "; the controller tells it with its next heartbeat"
    await _answer(exchange, target, lines + under_way, unheard)


def undrainable(
    service: RouterService, target: DrainTarget, *, force: bool, otherwise: str = "drain it"
) -> ApiError | None:
    """Return the error if the target can't be drained, else None. `otherwise`: what --force does all the same."""
    ready = target.in_state("ready")
    if not ready and not target.is_node and not target.in_state("draining"):
        return conflict(f"{target.name} is {target.entries[0].status.state}: only a ready worker can be drained")
    for role in {e.record.role for e in ready} & set(service.core.workers.needed):
        left = [e for e in service.core.workers.staying(role, service.clock.now()) if e not in ready]
        if not left and not force:
            those = ready[0].record.name if len(ready) == 1 else target.name
            return conflict(
                f"{those} is the last {role} worker that serves, and nothing is answered without one: start another "
                f"first (twinpool add {role}), or {otherwise} all the same with --force (force=true)"
            )
    return None


async def _fail_over_now(service: RouterService, exchange: HttpExchange, target: DrainTarget) -> None:
    """Start requests of draining workers over elsewhere; a request that no other worker can take stays.

    Answers with ``taken`` and ``kept``, counts of requests.
    """
    draining = target.in_state("draining")
    if not draining:
        return await exchange.fail(conflict(f"{target.name} is not draining: drain it first"))
    taken = sum(service.fail_over(e.key) for e in draining)
    kept = sum(len(e.requests) for e in draining)
    await exchange.answer_json(200, {"taken": taken, "kept": kept})


async def undrain(service: RouterService, exchange: HttpExchange) -> None:
    """As `_undrain`, after the orders that are under way."""
    async with service.orders:
        await _undrain(service, exchange)


async def _undrain(service: RouterService, exchange: HttpExchange) -> None:
    """Let draining workers admit again, have workers that had left started again, and uncordon the node."""
    target = find_target(service, name_after(exchange, "/cluster/undrain/"))
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    now = service.clock.now()
    draining = target.in_state("draining") + [e for e in target.in_state("ready") if e.drains or now < e.leaves_until]
    gone = target.in_state(*GONE)
    if not draining and not gone and not target.is_node:
        return await exchange.fail(conflict(f"{target.name} is not draining; it is {target.entries[0].status.state}"))
    lines = [_line(e.status, "starts again") for e in gone]
    unheard = await _ask_controller(service, target, UndrainWorkers(target.name))
    if isinstance(unheard, ApiError):
        return await exchange.fail(unheard)
    for entry in draining:
        entry.cancel_drain()
    lines += await _tell(service, draining, drain=False)
    # Unlike a drain, an undrain can't come by heartbeat: the worker must hear it before it has left.
    await _answer(exchange, target, lines, "" if target.is_node else "it goes on draining")


async def _ask_controller(
    service: RouterService, target: DrainTarget, change: DrainWorkers | UndrainWorkers
) -> str | ApiError:
    """Order a drain or undrain from the controller.

    Returns an empty string once the controller has taken the order; the reason when it can't be reached and the workers
    can still be told directly; an `ApiError` when the controller refuses, or the order can't be done without it.
    """
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await service.worker_links.directory.change_pools(change)
    except RequestError as error:
        if target.entries:
            return conflict(str(error))
        message = f"{error}; workers: {known_workers(service)}"
        return ApiError(404, message, "invalid_request_error", "unknown")
    except (OSError, TimeoutError) as error:
        reason = f"the controller can't be reached: {str(error) or 'no answer in time'}"
        if target.is_node or target.in_state(*GONE):
            return ApiError(503, reason, "server_error", "down")
        return reason
    return ""


async def _answer(exchange: HttpExchange, target: DrainTarget, lines: Sequence[dict[str, Any]], hopeless: str) -> None:
    """Answer with a row for each worker, by name.

    `hopeless`, if not empty, says why a worker that can't be reached now won't hear of the order later either; the
    answer is then an error if there is such a worker.
    """
    failed = [line for line in lines if line["state"] == "unreachable"]
    if failed and hopeless:
        message = f"{target.name} {failed[0]['outcome']}; {hopeless}"
        return await exchange.fail(ApiError(503, message, "server_error", "unreachable"))
    ordered = sorted(lines, key=lambda line: natural(line["name"]))
    one = ordered[0] if ordered and not target.is_node else {"node": target.name}
    await exchange.answer_json(200, {**one, "target": target.name, "is_node": target.is_node, "workers": ordered})


async def role(service: RouterService, exchange: HttpExchange) -> None:
    """As `_role`, after the orders that are under way."""
    async with service.orders:
        await _role(service, exchange)


async def _role(service: RouterService, exchange: HttpExchange) -> None:
    """Drain a worker, and have it started again in the other role. Answers with the incarnation that leaves."""
    name = name_after(exchange, "/cluster/role/")
    target = find_target(service, name, nodes=False)
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    (entry,) = target.entries
    wanted = parse_qs(exchange.query.decode("latin-1")).get("role", [""])[-1]
    if wanted not in PAIR:
        return await exchange.fail(conflict(f"role must be {' or '.join(PAIR)}, got {wanted!r}"))
    if entry.record.role is Role.COLOCATED:
        return await exchange.fail(conflict(f"{name} is colocated: it has both roles, and keeps them"))
    if entry.record.role == wanted:
        return await exchange.fail(conflict(f"{name} is a {wanted} worker already"))
    if entry.status.state != "ready":
        return await exchange.fail(conflict(f"{name} is {entry.status.state}: only a ready worker changes its role"))
    force = asked(exchange, "force")
    if failure := undrainable(service, target, force=force, otherwise=f"make it a {wanted} worker"):
        return await exchange.fail(failure)
    entry.request_drain(service.clock.now())
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await service.worker_links.directory.change_pools(SetRole(entry.record.name, Role(wanted), empty=force))
    except RequestError as error:
        entry.cancel_drain()
        return await exchange.fail(conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        return await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    await exchange.answer_json(200, {"name": name, "role": wanted, "incarnation": entry.record.incarnation})


def name_after(exchange: HttpExchange, before: str) -> str:
    return unquote(exchange.path.removeprefix(before))


def asked(exchange: HttpExchange, flag: str) -> bool:
    return parse_qs(exchange.query.decode("latin-1")).get(flag, ["false"])[-1].lower() in ("1", "true", "yes")


def find_target(service: RouterService, name: str, *, nodes: bool = True) -> DrainTarget | ApiError:
    """Return the worker of that name, else the node of that name with all its known workers; or the error.

    The error is 503 before the workers are known, and 404 for an unknown worker where nodes aren't allowed.
    """
    if failure := unknown_as_yet(service):
        return failure
    workers = service.core.workers
    entry = workers.named(name)
    if entry is not None:
        return DrainTarget(name, False, (entry,))
    if nodes and name:
        # Only the controller knows a node without workers; it refuses names that are no node's.
        return DrainTarget(name, True, tuple(e for e in workers if _is_node(e, name)))
    message = f"no worker is named {name!r}; there are: {known_workers(service)}"
    return ApiError(404, message, "invalid_request_error", "unknown")


def known_workers(service: RouterService) -> str:
    return ", ".join(sorted((str(e.record.name) for e in service.core.workers), key=natural)) or "none"


def _is_node(entry: WorkerEntry, name: str) -> bool:
    of_ray = len(name) >= NODE_ID_CHARS
    return any(node == name or (of_ray and node_id.startswith(name)) for node, node_id in entry.record.nodes)


def conflict(message: str) -> ApiError:
    return ApiError(409, message, "invalid_request_error", "conflict")


async def _tell(service: RouterService, entries: Sequence[WorkerEntry], *, drain: bool) -> list[dict[str, Any]]:
    """Tell all workers at once; returns a row for each, in order, also for those that can't be reached."""
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
    """Return the worker's status after the order, or the reason why the worker can't be reached."""
    port = service.worker_links.port(target.key)
    if port is None:
        return "there is no link to it"
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await (port.drain() if drain else port.undrain())
    except (OSError, TimeoutError) as error:
        return str(error) or "no answer in time"


MAX_AT_ONCE = 1024
"""The most workers that one order may ask for."""


async def add(service: RouterService, exchange: HttpExchange) -> None:
    """Start workers more. Answers 409 where the controller refuses."""
    if failure := unknown_as_yet(service):
        return await exchange.fail(failure)
    query = _query(exchange)
    try:
        change = AddWorkers(
            _named_role(query.get("role", "")), _count("count", query.get("count", "1")), query.get("node", "")
        )
    except RequestError as error:
        return await exchange.fail(_invalid(error))
    await _change(service, exchange, change)


async def scale(service: RouterService, exchange: HttpExchange) -> None:
    """Bring the named pools to so many workers; other pools stay. With ``force`` a pool may be left empty."""
    if failure := unknown_as_yet(service):
        return await exchange.fail(failure)
    try:
        query = {key: value for key, value in _query(exchange).items() if key != "force"}
        counts = {_named_role(role): _count(role, number) for role, number in query.items()}
        if not counts:
            raise RequestError("name a pool and its number of workers: ?decode=3")
    except RequestError as error:
        return await exchange.fail(_invalid(error))
    await _change(service, exchange, ScalePools(counts, empty=asked(exchange, "force")))


async def restart(service: RouterService, exchange: HttpExchange) -> None:
    """As `_restart`, after the orders that are under way."""
    async with service.orders:
        await _restart(service, exchange)


async def _restart(service: RouterService, exchange: HttpExchange) -> None:
    """Have a worker drain and start again; one that has left or is dead is started. Answers with the incarnation that
    leaves. With ``force`` even the last worker of its role."""
    target = find_target(service, name_after(exchange, "/cluster/restart/"), nodes=False)
    if isinstance(target, ApiError):
        return await exchange.fail(target)
    (entry,), force = target.entries, asked(exchange, "force")
    if entry.status.state == "ready":
        if failure := undrainable(service, target, force=force, otherwise="restart it"):
            return await exchange.fail(failure)
        entry.request_drain(service.clock.now())
    keep = () if force else service.core.workers.needed
    if not await _change(service, exchange, RestartWorker(entry.record.name, tuple(keep))):
        entry.cancel_drain()


async def cordon(service: RouterService, exchange: HttpExchange) -> None:
    """Place no worker on a node any more."""
    await _cordon(service, exchange, "/cluster/cordon/", CordonNode)


async def uncordon(service: RouterService, exchange: HttpExchange) -> None:
    """Let workers be placed on a node again."""
    await _cordon(service, exchange, "/cluster/uncordon/", UncordonNode)


async def _cordon(
    service: RouterService, exchange: HttpExchange, path: str, change: type[CordonNode] | type[UncordonNode]
) -> None:
    if failure := unknown_as_yet(service):
        return await exchange.fail(failure)
    await _change(service, exchange, change(name_after(exchange, path)))


async def _change(service: RouterService, exchange: HttpExchange, change: PoolChange) -> bool:
    """Pass a change on to the controller, and answer; returns whether the controller has made it."""
    before = {entry.record.name: (entry.record.incarnation, entry.status.state) for entry in service.core.workers}
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            changed = await service.worker_links.directory.change_pools(change)
    except RequestError as error:
        await exchange.fail(conflict(str(error)))
        return False
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
        return False
    names = (change.name,) if isinstance(change, RestartWorker) else changed.names
    rows = [_row(name, before.get(name, (0, "new")), change, changed) for name in names]
    await exchange.answer_json(200, {"workers": rows})
    return True


def _row(name: WorkerName, before: tuple[int, str], change: PoolChange, changed: ChangedWorkers) -> dict[str, Any]:
    """A worker of the answer: its incarnation before the change, 0 where it is new, and what becomes of it. `before`:
    that, and its state, as this router knew them; of who starts and who leaves the controller knows better."""
    incarnation, state = before
    match change:
        case AddWorkers():
            outcome = "starts"
        case ScalePools() if name in changed.start or name in changed.leave:
            outcome = "starts" if name in changed.start else "leaves"
        case ScalePools():
            outcome = "starts" if state in ("new", *GONE) else "leaves"
        case RestartWorker():
            outcome = "leaves and starts again" if state in ("ready", "draining") else "starts"
        case CordonNode() | UncordonNode():
            outcome = "is started elsewhere"
    return {"name": name, "incarnation": incarnation, "outcome": outcome}


def _query(exchange: HttpExchange) -> dict[str, str]:
    return {
        key: values[-1] for key, values in parse_qs(exchange.query.decode("latin-1"), keep_blank_values=True).items()
    }


def _named_role(name: str) -> Role:
    if name not in set(Role):
        raise RequestError(f"a role is {', '.join(Role)}; got {name!r:.40}")
    return Role(name)


def _count(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= MAX_AT_ONCE):
        raise RequestError(f"{what} must be a whole number of workers, at most {MAX_AT_ONCE}; got {text!r:.40}")
    return int(text)


def _invalid(error: RequestError) -> ApiError:
    return ApiError(400, str(error), "invalid_request_error", "invalid")


SETTINGS_DEADLINE_S = 20.0
"""Seconds for the controller's answer, which has longer than the supervisor's to it."""


async def apply(service: RouterService, exchange: HttpExchange) -> None:
    """Change the settings that the body names, or with ``dry_run`` say what that would do. Answers 409 with the reason
    where nothing was changed."""
    raw = await exchange.body(MAX_SETTINGS_BYTES, service.buffer)
    try:
        tree = read_json(raw)
    except ValueError as error:
        tree = error
    exchange.forget_body()
    if not isinstance(tree, dict):
        return await exchange.fail(
            ApiError(400, "the body must be JSON: an object of sections", "invalid_request_error", "invalid")
        )
    change = SettingsChange(json.dumps(tree), asked(exchange, "dry_run"))
    try:
        async with asyncio.timeout(SETTINGS_DEADLINE_S):
            answer = await service.worker_links.directory.change_settings(change)
    except RequestError as error:
        return await exchange.fail(conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        return await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    await exchange.answer_json(200, _settings_shown(answer))


def _settings_shown(answer: SettingsAnswer) -> dict[str, Any]:
    changed = [
        {"key": one.key, "before": one.before, "after": one.after, "roles": list(one.roles), "by": one.by}
        for one in answer.changed
    ]
    digests = {str(role): digest for role, digest in answer.digests.items()}
    return {"changed": changed, "digests": digests, "behind": answer.behind, "trouble": answer.trouble}
