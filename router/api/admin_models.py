"""Operators' endpoints of what is served: adapters, weights, caches, pauses and sleep. All take and answer JSON.

Adapters are loaded and dropped by vLLM's paths, which only operators may use here:

    POST /v1/load_lora_adapter      lora_name, lora_path, and load_inplace where another has the name
    POST /v1/unload_lora_adapter    lora_name

Weights change while the cluster serves, to those of a folder below `engine.weight_roots`:

    POST /v1/weights    path, and version, rolling, wait_s, wait; GET tells which are served, and how far a change is
    POST /v1/weights/push    a safetensors file as the body, which is kept in memory; the rest in the query, and partial
                        where tensors that are missing stay as they are
    POST /v1/weights/revert    the way back to the checkpoint that the cluster was started with: rolling, wait_s, wait
    POST /v1/flush      let nothing that was computed so far be found any more, on any tier: wait_s, wait
    POST /v1/pause      have workers make no steps and keep all requests, from the end of the step under way on
    POST /v1/resume     have them go on
    POST /v1/sleep      have workers leave: level (1: processes keep the weights in memory; 2: nothing), wait_s, wait
    POST /v1/wake       start them again: wait

The controller has what is served in its ledger, and decides. With `wait`, which is so where it isn't said, the answer
comes when the change is through, or was given up: then it is 409 with the reason. `wait_s` is how long requests that
run may go on as they are; then they begin anew, those of which something was told end with an error.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from twinpool.contracts.checkpoint.adapter_files import adapter_ref
from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf
from twinpool.contracts.checkpoint.pushed_weights import IncomingWeights
from twinpool.contracts.checkpoint.safetensors_headers import weights_folder
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.message_types import NAME_CHARS
from twinpool.contracts.messages.pool_changes import (
    FlushCaches,
    LoadAdapter,
    PauseCluster,
    SleepCluster,
    UnloadAdapter,
)
from twinpool.contracts.outside_data import read_json
from twinpool.router.api.admin_status import unknown_as_yet
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.api.serving_changes import (
    WAIT_S,
    bad_change,
    changed,
    conflict,
    make_change,
    order_pushed,
    shown,
    weights_change,
)
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.parse_request import sampling_defaults
from twinpool.router.openai.request_fields import BOOLEAN, INTEGER, TEXT, Schema, object_of, or_null
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.worker_table import weights_version

Handler = Callable[[RouterService, HttpExchange], Awaitable[None]]
"""An endpoint: it answers the exchange."""

# ---------------------------------------------------------------- adapters

_ADAPTER_FIELDS = {"lora_name": str, "lora_path": str, "load_inplace": bool}
"""As vLLM has them."""


async def load_adapter(service: RouterService, exchange: HttpExchange) -> None:
    """Serve an adapter: ``lora_name``, and ``lora_path``, an absolute folder below `adapters.roots` that this router
    and the workers can read. With ``load_inplace`` in place of another of that name. Answers 409 with the reason where
    nothing was changed."""
    if (asked := await _adapter_body(service, exchange, "lora_name lora_path", "load_inplace")) is None:
        return
    name, settings = asked["lora_name"], service.adapter_settings
    if name in service.spec.names:
        return await exchange.fail(conflict(f"{name} is the model's own name"))
    try:
        adapter = await asyncio.to_thread(adapter_ref, name, asked["lora_path"], settings.allowed, settings.max_rank)
    except CheckpointError as error:
        return await exchange.fail(conflict(str(error)))
    change = LoadAdapter(adapter, replace=asked.get("load_inplace", False))
    if await changed(service, exchange, change) is not None:
        await exchange.answer_json(200, {"lora_name": name, "digest": adapter.digest})


async def unload_adapter(service: RouterService, exchange: HttpExchange) -> None:
    """Serve an adapter no more: ``lora_name``. Requests that have it go on with it."""
    asked = await _adapter_body(service, exchange, "lora_name")
    if asked is None or await changed(service, exchange, UnloadAdapter(asked["lora_name"][:NAME_CHARS])) is None:
        return
    await exchange.answer_json(200, asked)


# ---------------------------------------------------------------- weights, caches, pauses, sleep

_SERVING_FIELDS: dict[str, type | tuple[type, ...]] = {
    **{"path": str, "version": str, "rolling": bool, "wait": bool, "level": int, "partial": bool},
    "wait_s": (int, float),
}
PIECE_BYTES = 4 << 20
"""Of pushed weights what a thread is given at a time."""


async def weights(service: RouterService, exchange: HttpExchange) -> None:
    """Answer with what is served, and how far a change is."""
    if failure := unknown_as_yet(service):
        return await exchange.fail(failure)
    await exchange.answer_json(200, shown(service))


async def update_weights(service: RouterService, exchange: HttpExchange) -> None:
    """Change the weights to those of ``path``, an absolute folder of safetensors below `engine.weight_roots`, which all
    workers can read; ``version`` names them in answers, else their digest does. All workers change as soon as their
    requests have ended, or with ``rolling`` one after the other. Answers 409 with the reason where nothing was
    changed."""
    if (asked := await _body(service, exchange, "path", "version rolling wait_s wait partial")) is None:
        return
    if failure := bad_change(service, asked):
        return await exchange.fail(failure)
    pushed = service.controller.pushed
    try:
        path = await asyncio.to_thread(weights_folder, asked["path"], service.weight_roots)
        if len(str(path)) > NAME_CHARS:
            raise CheckpointError(f"the folder's path has more than {NAME_CHARS} characters")
        if path in pushed:
            await asyncio.to_thread(pushed.take, path)
        elif asked.get("partial"):
            raise CheckpointError("partial is for weights that are pushed: put all tensors into the folder")
    except CheckpointError as error:
        return await exchange.fail(conflict(str(error)))
    if path in pushed:
        return await order_pushed(service, exchange, path, asked)
    await make_change(service, exchange, weights_change(str(path), asked.get("version", ""), asked), asked)


async def push_weights(service: RouterService, exchange: HttpExchange) -> None:
    """Change the weights to the tensors of the safetensors file that the body is, which is kept in memory below the
    first of `engine.weight_roots` for as long as a worker may read it. The query has ``version``, ``rolling``,
    ``wait_s`` and ``wait``, as `update_weights` takes them, and ``partial``: tensors that the file lacks stay as they
    are. A header Content-Digest (RFC 9530) with its SHA-256 is compared. Answers 409 with the reason where nothing was
    changed."""
    asked = _asked_in_query(exchange)
    if isinstance(asked, ApiError):
        return await exchange.refuse_body(asked)
    if failure := bad_change(service, asked) or _no_push(service):
        return await exchange.refuse_body(failure)
    pushed = service.controller.pushed
    pushed.receiving = True
    try:
        folder, held = await _receive(service, exchange, partial=asked.get("partial", False))
        await asyncio.to_thread(pushed.take, folder, held)
    except CheckpointError as error:
        return await (exchange.fail if exchange.body_done else exchange.refuse_body)(conflict(str(error)))
    finally:
        pushed.receiving = False
    await order_pushed(service, exchange, folder, asked)


def _no_push(service: RouterService) -> ApiError | None:
    """Why weights can't be pushed now, before any of them has come."""
    pushed, served = service.controller.pushed, service.core.workers.served
    if pushed.root is None:
        return conflict("weights are pushed to a folder in memory: the operator sets engine.weight_roots")
    if is_gguf(service.spec.path):
        return conflict(f"{service.spec.path.name} is a GGUF file, whose weights can't be changed while it is served")
    if pushed.receiving:
        return conflict("weights are being pushed already; wait for their end")
    if served.pending is not None or served.asleep:
        return conflict("a change is being prepared; wait for its end" if served.pending else "the cluster sleeps")
    return None


def _asked_in_query(exchange: HttpExchange) -> dict[str, Any] | ApiError:
    """What the query of a push asks for, as a body of `update_weights` would; the model is another's to read."""
    asked: dict[str, Any] = {}
    for key, text in parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True):
        if key in ("rolling", "wait", "partial") and text in ("true", "false"):
            asked[key] = text == "true"
        elif key == "wait_s" and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
            asked[key] = float(text)
        elif key == "version":
            asked[key] = text
        elif key != "model":
            message = "the query takes version, wait_s in seconds, and rolling, wait and partial: true or false"
            return ApiError(400, message, "invalid_request_error", "invalid", key[:64])
    return asked


async def _receive(service: RouterService, exchange: HttpExchange, *, partial: bool) -> tuple[Path, int]:
    """The folder of the file that the body is, once all of it is there and right, and the descriptor that holds it."""
    said, digest = exchange.header(b"content-digest"), None
    if said:
        try:
            digest = base64.b64decode(said.removeprefix("sha-256=:").removesuffix(":"), validate=True)
        except (binascii.Error, ValueError):
            digest = b""
        if not said.startswith("sha-256=:") or len(digest) != 32:
            raise CheckpointError("Content-Digest is sha-256=:BASE64:, of the body's 32 bytes of SHA-256")
    root, wanted = service.controller.pushed.root, service.spec.headers
    assert root is not None
    incoming = await asyncio.to_thread(lambda: IncomingWeights(root, wanted, partial=partial))
    try:
        piece = bytearray()
        async for part in exchange.pieces(IncomingWeights.most(wanted)):
            piece += part
            if len(piece) >= PIECE_BYTES:
                await asyncio.to_thread(incoming.feed, bytes(piece))
                piece.clear()
        await asyncio.to_thread(incoming.feed, bytes(piece))
        return await asyncio.to_thread(incoming.finish, digest)
    finally:
        incoming.close()


async def revert_weights(service: RouterService, exchange: HttpExchange) -> None:
    """Change the weights back to the checkpoint's, with which the cluster was started; otherwise as `update_weights`,
    whichever folder `engine.weight_roots` allows."""
    if (asked := await _body(service, exchange, "", "rolling wait_s wait")) is not None:
        await make_change(service, exchange, weights_change("", "", asked), asked)


async def flush(service: RouterService, exchange: HttpExchange) -> None:
    """Let nothing that was computed so far be found any more: workers go on with the same weights and empty caches."""
    if (asked := await _body(service, exchange, "", "wait_s wait")) is not None:
        await make_change(service, exchange, FlushCaches(asked.get("wait_s", WAIT_S)), asked)


async def pause(service: RouterService, exchange: HttpExchange) -> None:
    """Have workers make no steps, and keep what they have."""
    if (asked := await _body(service, exchange, "", "wait")) is not None:
        await make_change(service, exchange, PauseCluster(), asked)


async def resume(service: RouterService, exchange: HttpExchange) -> None:
    """Have workers go on that were paused."""
    if (asked := await _body(service, exchange, "", "wait")) is not None:
        await make_change(service, exchange, PauseCluster(paused=False), asked)


async def sleep(service: RouterService, exchange: HttpExchange) -> None:
    """Have all workers leave, and start none; ``level`` is 1 where nothing is said."""
    if (asked := await _body(service, exchange, "", "level wait_s wait")) is None:
        return
    level = asked.get("level", 1)
    if level not in (1, 2):
        message = "a level of sleep is 1 or 2; POST /v1/wake wakes"
        return await exchange.fail(ApiError(400, message, "invalid_request_error", "invalid", "level"))
    await make_change(service, exchange, SleepCluster(level, asked.get("wait_s", WAIT_S)), asked)


async def wake(service: RouterService, exchange: HttpExchange) -> None:
    """Have workers started again that left to sleep."""
    if (asked := await _body(service, exchange, "", "wait")) is not None:
        await make_change(service, exchange, SleepCluster(0), asked)


# ---------------------------------------------------------------- what both have in common


async def _adapter_body(
    service: RouterService, exchange: HttpExchange, needed: str, more: str = ""
) -> dict[str, Any] | None:
    return await _body(service, exchange, needed, more, _ADAPTER_FIELDS)


async def _body(
    service: RouterService,
    exchange: HttpExchange,
    needed: str,
    more: str = "",
    types: Mapping[str, type | tuple[type, ...]] = _SERVING_FIELDS,
) -> dict[str, Any] | None:
    """The fields of the body, all of `needed` and none but these and `more`; None where they were refused. Where none
    is needed there may be no body."""
    raw = await exchange.body(64 * 1024, service.buffer)
    try:
        asked = read_json(raw) if raw or needed else {}
    except ValueError:
        asked = None
    exchange.forget_body()
    given: dict[str, Any] = asked if isinstance(asked, dict) else {}
    known = {*needed.split()} <= given.keys() <= {*needed.split(), *more.split()}
    if isinstance(asked, dict) and known and all(_is_a(value, types[key]) for key, value in given.items()):
        return given
    fields = " and ".join(needed.split()) + (f", and {' and '.join(more.split())} at most" if more else "")
    message = f"the body must be JSON: an object with {fields.lstrip(', ')}"
    await exchange.fail(ApiError(400, message, "invalid_request_error", "invalid"))
    return None


def _is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (isinstance(value, bool) <= (kind is bool))


# ---------------------------------------------------------------- what is said of them


def model_card(service: RouterService, name: str) -> dict[str, Any]:
    """What `/v1/models` says of a name: the model, or an adapter over it."""
    adapter = service.intake.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "twinpool",
        "root": service.spec.name if adapter is None else adapter.name,
        "parent": None if adapter is None else service.spec.name,
        "max_model_len": service.spec.context,
        "tools": service.intake.tools,
        "images": service.spec.pictures is not None and service.config.max_images > 0,
        "sampling_defaults": sampling_defaults(service.spec),
        "weights_version": weights_version(service.core.workers),
        "state": state_of(service),
    }


def health_problems(service: RouterService) -> list[str]:
    """Return why a router can't serve now, each reason in words; nothing where it can."""
    core = service.core
    problems = ["the server is shutting down: it ends when the answers that run have ended"] if service.draining else []
    problems += [f"no {role} worker can serve" for role in core.workers.needed if not core.serving(role)]
    served = core.workers.served
    if served.asleep:
        problems = [f"the cluster sleeps, at level {served.asleep}: wake it (POST /v1/wake)"]
    if service.demand.by_demand and not service.draining:
        problems = []  # A request wakes it, or has.
    if served.paused:
        problems.append("the cluster is paused: resume it (POST /v1/resume)")
    elif core.progress.stalled_s > service.config.stall_s:
        problems.append(f"work waits and nothing has advanced for {core.progress.stalled_s:.1f} s")
    return problems


def health_of(service: RouterService) -> dict[str, Any]:
    """What `/health` says of a model; nothing is in its `problems` where it can be served."""
    core, problems = service.core, health_problems(service)
    return {
        "status": "draining" if service.draining else "unhealthy" if problems else "ok",
        "problems": problems,
        "serving": {str(role): len(core.serving(role)) for role in core.workers.roles},
        "in_flight": core.requests.in_flight,
        "waiting": core.requests.waiting,
    }


def state_of(service: RouterService) -> str:
    """Whether a model can be served now, in a word: `ready`, `asleep`, `waking`, or `unavailable`."""
    core = service.core
    if core.workers.served.asleep:
        return "asleep"
    if service.demand.needed:
        return "waking"
    if all(core.serving(role) for role in core.workers.needed):
        return "ready"
    return "unavailable"


_NUMBER: Schema = {"type": "number"}
MODEL_SCHEMA: Schema = object_of(
    "id object created owned_by root parent max_model_len images weights_version state",
    id=TEXT,
    object={"const": "model"},
    created=INTEGER,
    owned_by=TEXT,
    root=TEXT,
    parent=or_null(TEXT),
    max_model_len=INTEGER,
    images=BOOLEAN,
    weights_version=TEXT,
    state={"enum": ["ready", "asleep", "waking", "unavailable"]},
)
"""For `/openapi.json`: a model of `/v1/models`."""
SERVED_BODIES: dict[str, Schema] = {
    "/v1/load_lora_adapter": object_of("lora_name lora_path", lora_name=TEXT, lora_path=TEXT, load_inplace=BOOLEAN),
    "/v1/unload_lora_adapter": object_of("lora_name", lora_name=TEXT),
    "/v1/weights": object_of(
        "path", path=TEXT, version=TEXT, rolling=BOOLEAN, wait_s=_NUMBER, wait=BOOLEAN, partial=BOOLEAN
    ),
    "/v1/weights/push": {"type": "string", "contentMediaType": "application/octet-stream"},
    "/v1/weights/revert": object_of("", rolling=BOOLEAN, wait_s=_NUMBER, wait=BOOLEAN),
    "/v1/flush": object_of("", wait_s=_NUMBER, wait=BOOLEAN),
    "/v1/sleep": object_of("", level={"enum": [1, 2]}, wait_s=_NUMBER, wait=BOOLEAN),
    **dict.fromkeys(("/v1/pause", "/v1/resume", "/v1/wake"), object_of("", wait=BOOLEAN)),
}
"""For `/openapi.json`: by path, the schema of its body."""
_WAITED = (200, 202)
"""202 where the answer didn't wait for all workers."""
SERVED_PATHS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "/v1/load_lora_adapter": ("Serve an adapter from a folder below adapters.roots", "post", (200,)),
    "/v1/unload_lora_adapter": ("Serve an adapter no more", "post", (200,)),
    "/v1/weights": ("The weights that are served; change them", "get post", _WAITED),
    "/v1/weights/push": ("Change the weights to those of the body, a safetensors file", "post", _WAITED),
    "/v1/weights/revert": ("Change back to the checkpoint's weights", "post", _WAITED),
    "/v1/flush": ("Empty all prefix caches", "post", _WAITED),
    "/v1/pause": ("Stop all steps at their edge", "post", _WAITED),
    "/v1/resume": ("Let paused workers go on", "post", _WAITED),
    "/v1/sleep": ("Have all workers leave until they are woken", "post", _WAITED),
    "/v1/wake": ("Start workers that sleep again", "post", _WAITED),
}
"""What only operators may ask for, though it isn't below ``/cluster/``, since clients of vLLM know such paths: for what
it is, methods, statuses of answers that are no errors."""
SERVED_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/load_lora_adapter": {"POST": load_adapter},
    "/v1/unload_lora_adapter": {"POST": unload_adapter},
    "/v1/weights": {"GET": weights, "POST": update_weights},
    "/v1/weights/push": {"POST": push_weights},
    "/v1/weights/revert": {"POST": revert_weights},
    "/v1/flush": {"POST": flush},
    "/v1/pause": {"POST": pause},
    "/v1/resume": {"POST": resume},
    "/v1/sleep": {"POST": sleep},
    "/v1/wake": {"POST": wake},
}
