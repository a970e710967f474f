"""An operator's change of what is served, as a router makes it: looked at, ordered of the controller, waited for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from twinpool.contracts.checkpoint.pushed_weights import check_pushed, complete
from twinpool.contracts.checkpoint.safetensors_headers import (
    SINGLE,
    TensorHeader,
    digest_files,
    read_file_headers,
    read_headers,
    weights_folder,
)
from twinpool.contracts.errors import CheckpointError, RequestError
from twinpool.contracts.message_types import as_dict
from twinpool.contracts.messages.pool_changes import (
    ChangedWorkers,
    OperatorChange,
    PauseCluster,
    SleepCluster,
    UpdateWeights,
)
from twinpool.contracts.sampling_params import WeightsVersion
from twinpool.router.api.admin_status import STATUS_DEADLINE_S, unknown_as_yet
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.worker_table import GONE, weights_version

WAIT_S, ROLLING_WAIT_S, MAX_WAIT_S = 30.0, 600.0, 86_400.0
"""Seconds that requests have to end as they are: where all workers change at once, one after the other, at most."""
THROUGH_S = 3600.0
"""Seconds after which an answer that waits for a change to be through says how far it is."""
LOOK_S = 0.05
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,126}")


def bad_change(service: RouterService, asked: Mapping[str, Any]) -> ApiError | None:
    """Why a change of weights can't be ordered as it is asked for, before anything is looked at."""
    if failure := unknown_as_yet(service):
        return failure
    version = asked.get("version", "")
    if version and not _VERSION.fullmatch(version):
        message = "a version has 1 to 127 letters, digits and any of ._:/+@-, a letter or digit first"
        return ApiError(400, message, "invalid_request_error", "invalid", "version")
    return _bad_wait(asked)


def _bad_wait(asked: Mapping[str, Any]) -> ApiError | None:
    if 0 <= asked.get("wait_s", 0.0) <= MAX_WAIT_S:
        return None
    message = f"wait_s is a number of seconds, 0 to {MAX_WAIT_S:g}"
    return ApiError(400, message, "invalid_request_error", "invalid", "wait_s")


def weights_change(path: str, version: str, asked: Mapping[str, Any]) -> UpdateWeights:
    rolling = asked.get("rolling", False)
    return UpdateWeights(path, version, rolling, asked.get("wait_s", ROLLING_WAIT_S if rolling else WAIT_S))


async def make_change(
    service: RouterService,
    exchange: HttpExchange,
    change: OperatorChange,
    asked: dict[str, Any],
    folder: Path | None = None,
) -> None:
    """Have the controller make a change, wait until it is through where that is asked for, and answer how it went.
    `folder`: of the pushed weights that it is about."""
    if failure := unknown_as_yet(service) or _bad_wait(asked):
        return await exchange.fail(failure)
    made = await changed(service, exchange, change, folder)
    if made is None:
        return
    if folder is not None:
        service.controller.pushed.ordered(folder, made.number)
    through = asked.get("wait", True) and await _reached(exchange, lambda: _is_through(service, change, made.number))
    failed = service.core.workers.served.failed
    if through and failed and isinstance(change, UpdateWeights) and not _took(service, made.number):
        return await exchange.fail(conflict(f"the weights stay as they are: {failed}"))
    await exchange.answer_json(200 if through else 202, shown(service))


async def order_pushed(service: RouterService, exchange: HttpExchange, folder: Path, asked: dict[str, Any]) -> None:
    """Have the cluster change to pushed weights that this router holds; they go where that is refused."""
    pushed, change = service.controller.pushed, weights_change(str(folder), asked.get("version", ""), asked)
    try:
        sent = await asyncio.to_thread(read_file_headers, folder / SINGLE)
        check_pushed(sent, service.spec.headers, partial=asked.get("partial", False))
        if asked.get("partial"):
            served = service.core.workers.served.weights
            present = await asyncio.to_thread(_present, service, served)
            await asyncio.to_thread(complete, folder, present)
            change = replace(change, onto=served.number)
        await make_change(service, exchange, change, asked, folder)
    except CheckpointError as error:
        await asyncio.to_thread(pushed.refused, folder)
        await exchange.fail(conflict(str(error)))
    finally:
        pushed.unsure(folder)


def _present(service: RouterService, served: WeightsVersion) -> Mapping[str, TensorHeader]:
    """The tensors that are served. Raises `CheckpointError` where their files have changed since."""
    if not served.path:
        return service.spec.headers
    present = read_headers(weights_folder(served.path, service.weight_roots))
    if digest_files(present) != served.digest:
        raise CheckpointError(f"{served.path} has other files than those that are served: push all tensors")
    return present


async def changed(
    service: RouterService, exchange: HttpExchange, change: OperatorChange, folder: Path | None = None
) -> ChangedWorkers | None:
    """What the controller answers to a change; None where it was answered with an error. `folder`: as `make_change`."""
    try:
        async with asyncio.timeout(STATUS_DEADLINE_S + 4.0):
            return await service.worker_links.directory.change_pools(change)
    except RequestError as error:
        if folder is not None:
            await asyncio.to_thread(service.controller.pushed.refused, folder)
        await exchange.fail(conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    return None


async def _reached(exchange: HttpExchange, reached: Callable[[], bool]) -> bool:
    """Wait until something is so, or the client has left, for `THROUGH_S` at most; returns whether it is so."""
    gone = asyncio.Event()
    exchange.on_gone(gone.set)
    try:
        async with asyncio.timeout(THROUGH_S):
            while not (done := reached()) and not gone.is_set():
                await asyncio.sleep(LOOK_S)
            return done
    except TimeoutError:
        return False


def _is_through(service: RouterService, change: OperatorChange, number: int) -> bool:
    """Whether all workers have followed, as far as this router knows, or the change was given up."""
    served, table = service.core.workers.served, service.core.workers
    alive = [entry for entry in table if entry.status.state not in GONE]
    match change:
        case SleepCluster(level=level) if level:
            return served.asleep == level and not alive
        case PauseCluster(paused=paused):
            return served.paused == paused and all(entry.status.paused == paused for entry in alive)
        case SleepCluster():
            return not served.asleep and all(service.core.serving(role) for role in table.needed)
        case _ if served.tried < number or served.pending is not None:
            return False
        case _ if not _took(service, number):
            return bool(served.failed)
    current = [entry for entry in alive if entry.record.weights_number == served.weights.number]
    return not served.behind and len(current) == len(alive) and all(service.core.serving(role) for role in table.needed)


def _took(service: RouterService, number: int) -> bool:
    """Whether the change of this number, or a later one, is what is served."""
    return service.core.workers.served.weights.number >= number


def shown(service: RouterService) -> dict[str, Any]:
    served = service.core.workers.served
    workers = [
        {
            "name": entry.record.name,
            "state": entry.status.state,
            "weights_version": entry.record.weights_version,
            "prepared": bool(served.pending and entry.status.prepared == served.pending.number),
            "paused": entry.status.paused,
        }
        for entry in service.core.workers
    ]
    return {"weights_version": weights_version(service.core.workers), **as_dict(served), "workers": workers}


def conflict(message: str) -> ApiError:
    return ApiError(409, message, "invalid_request_error", "conflict")
