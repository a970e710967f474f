"""Draws a scenario from a seed: its clusters, requests and faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from twinpool.contracts.messages.pool_changes import (
    FlushCaches,
    PauseCluster,
    ServingChange,
    SleepCluster,
    UpdateWeights,
)
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.sim.fabric.hash_answers import VOCABULARY, recite
from twinpool.sim.scenario.scenario import (
    CONTEXT,
    FOLDERS,
    KINDS,
    LASTING,
    OPERATIONS,
    PAIRS,
    SERVING,
    UNLIKE,
    UNREADABLE,
    WHOLE,
    ClusterShape,
    PlannedFault,
    Reconnect,
    Scenario,
    ScenarioRequest,
    adapter_of,
    pool_set,
    rush,
    sampling_of,
    version_of,
)

ADAPTERS = ("one", "two", "three")
MODELS = ("small", "large")
"""Further models behind the same routers."""
SHARED = (
    "router", "partition", "slow", "corrupt", "metadata", "notice", "errors", "rot", "forget",
)  # fmt: skip
"""Faults of what all models' clusters share."""
STEP_TOKENS = 8
"""Token budget of a prefill step: prompts take several."""


def draw(seed: int) -> Scenario:
    """Draw the plan of a seed. In every third seed, memory is short."""
    rng = random.Random(f"plan {seed}")
    shape = _drafted(random.Random(f"drafts {seed}"), _shape(rng, seed % 3 == 0))
    shape = _with_adapters(random.Random(f"adapters {seed}"), shape)
    asks = _asks(rng, shape)
    faults = _faults(rng, shape, asks) + _absences(random.Random(f"controller {seed}"), asks)
    faults += _operations(random.Random(f"operations {seed}"), shape, asks)
    plan = Scenario(seed, shape, asks, tuple(sorted(faults, key=lambda fault: fault.at)))
    plan = _of_several_routers(random.Random(f"routers {seed}"), plan)
    plan = _with_equal_keys(random.Random(f"equal keys {seed}"), plan)
    plan = _with_serving_changes(random.Random(f"serving {seed}"), plan)
    plan = _with_background(random.Random(f"background {seed}"), plan)
    return _with_models(random.Random(f"models {seed}"), plan)


def _shape(rng: random.Random, pressed: bool) -> ClusterShape:
    page = rng.choice((2, 4, 4, 4, 8))
    plane = rng.choice(("shm", "shm", "zmq", "nixl"))
    return ClusterShape(
        prefill=rng.choice((1, 2, 2, 3)),
        decode=rng.choice((1, 1, 2) if pressed else (1, 2, 2, 3)),
        pools=rng.choice(("full", "full", "window", "state", "all")),
        page_tokens=page,
        plane=plane,
        adversarial=rng.random() < 0.3,
        delay_s=rng.choice((0.0002, 0.002, 0.02)),
        step_s=rng.choice((0.002, 0.02, 0.08)),
        nodes=1 if plane == "shm" else rng.randint(1, 3),
        kill_s=rng.choice((0.5, 2.0, 2.0, 8.0)),
        pressed=pressed,
        config=_config(rng, page, pressed),
    )


def _drafted(rng: random.Random, shape: ClusterShape) -> ClusterShape:
    """Have decode draft tokens, in some plans. From numbers of its own: what else a seed draws stays as it is."""
    drafts: dict[str, Any] = {"speculation": "off"}
    if rng.random() < 0.4:
        drafts = {"draft_tokens": rng.choice((1, 3, 8)), "draft_requests": rng.choice((1, 4, 64))}
    return replace(shape, config=shape.config | {"decode": shape.config["decode"] | drafts})


def _with_adapters(rng: random.Random, shape: ClusterShape) -> ClusterShape:
    """Have workers take adapters, in some plans without ranks; they hold all at once, or one less."""
    if rng.random() >= 0.25 or (shape.config["prefill"]["tp"], shape.config["decode"]["tp"]) != (1, 1):
        return shape
    load = ",".join(f"{name}=/{name}" for name in ADAPTERS)
    return replace(shape, config=shape.config | {"adapters": {"load": load, "max_loaded": rng.choice((2, 3))}})


def _config(rng: random.Random, page: int, pressed: bool) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "page_tokens": page,
        "prefix_reuse": rng.random() < 0.85,
        "arena": rng.choice(("auto", "auto", "none")),
        "eviction": rng.choice(("lru", "lfu", "fifo", "priority", "slru")),
    }
    if rng.random() < 0.6:
        cache["host_bytes"] = rng.choice((1, 2, 6)) * CONTEXT * 32
        cache["write_policy"] = rng.choice(("through", "selective", "back"))
        cache["load_back"] = rng.choice(("auto", "always", "always", "never"))
        if rng.random() < 0.6:
            cache["storage"] = {"backend": "memory", "max_bytes": rng.choice((4096, 65536, 1 << 20))}
            cache["prefetch"] = {
                "policy": rng.choice(("best_effort", "wait_complete", "timeout")),
                "batch_pages": rng.choice((1, 4)),
            }
    tight = rng.random() < 0.6
    tp = rng.choice(((1, 1),) * 8 + ((2, 1), (1, 2), (2, 2), (4, 2)))
    decode = _sizes(rng, page, tight)
    if pressed:
        # Memory for one request of the largest length, or for many that get longer than the requests before them.
        decode = {"device_tokens": CONTEXT + page * rng.randrange(3), "device_requests": 8}
    return {
        "cache": cache,
        "prefill": {
            "chunk_tokens": STEP_TOKENS,
            "max_running": rng.choice((1, 2, 8)),
            "cache": _sizes(rng, page, tight),
            "tp": tp[0],
        },
        "decode": {
            "max_batch_tokens": rng.choice((3, 16) if pressed else (1, 3, 16)),
            "metadata_slots": 8 if pressed else rng.choice((1, 2, 8)),
            "cache": decode,
            "tp": tp[1],
            "output_length_quantile": 0.1 if pressed else rng.choice((0.1, 0.75, 1.0)),
            "retract": rng.choice(("auto", "auto", "recompute", "copy" if "host_bytes" in cache else "auto")),
            "retract_limit": rng.choice((1, 3, 50)),
        },
        "audit": {"fraction": rng.choice((0.0, 0.0, 1.0))},
        "faults": {"retract_every": 0 if pressed else rng.choice((0, 0, 0, 3, 7))},
    }


def _sizes(rng: random.Random, page: int, tight: bool) -> dict[str, int]:
    """Draw the sizes of pools. Each holds the longest request; the rest decides whether requests wait."""
    tokens = CONTEXT + page * rng.randrange(0, CONTEXT // page // (2 if tight else 1) * (1 if tight else 4))
    return {"device_tokens": tokens, "device_requests": rng.randint(1, 2) if tight else rng.randint(2, 8)}


def _asks(rng: random.Random, shape: ClusterShape) -> tuple[ScenarioRequest, ...]:
    """Draw conversations: some continue an earlier answer, some share a prefix, some are repeated."""
    spec = pool_set(shape.pools, shape.page_tokens)
    system = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 20))]
    said: list[list[int]] = []
    asks: list[ScenarioRequest] = []
    at, impatient = 0.5, rng.choice((0.1, 0.1, 0.1, 0.5))
    length = rng.choice((4, 12, 40))
    salts = rng.choice((("",), ("",), ("", "a"), ("", "a", "b")))
    count = rng.choice((3, 6, 12, 24))
    count = min(count, 6) if shape.pressed else count
    for _ in range(count):
        at += rng.choice((0.0, 0.01, 0.1, 0.5, 1.0)) * rng.expovariate(1.0)
        words = list(rng.choice(said)) if said and rng.random() < 0.5 else list(system if rng.random() < 0.6 else [])
        words += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, length))]
        prompt = tuple(words[: CONTEXT - 26])
        sampling = sampling_of(rng, len(prompt), rng.choice((1, 2, 5, 12, 24)))
        ask = ScenarioRequest(
            len(asks),
            at,
            prompt,
            sampling,
            rng.choice(salts),
            rng.choice((0, 0, 0, 0, 5, -3)),
            leaves_at=at + rng.expovariate(2.0) if rng.random() < impatient else None,
            enough=rng.randint(1, 4) if rng.random() < 0.08 else None,
            deadline_s=rng.expovariate(1.0) + 0.01 if rng.random() < 0.05 else 600.0,
        )
        asks.append(ask)
        if rng.random() < 0.1:
            for choice in range(1, rng.randint(2, 4)):
                again = structs.replace(sampling, choice=choice)
                asks.append(replace(ask, number=len(asks), sampling=again, leaves_at=None, enough=None))
        said.append([*words, *recite(spec, prompt, sampling).tokens])
    if shape.pressed:
        asks += rush(rng, shape, len(asks), at)
    return _of_tenants(_hurried(_adapted(asks) if "adapters" in shape.config else asks))


def _adapted(asks: Sequence[ScenarioRequest]) -> list[ScenarioRequest]:
    """Let requests be of several adapters, or of none, drawn from what was asked. An adapter's requests have a salt of
    its own, as the router gives them."""
    rng, found = random.Random(f"adapters of {asks!r}"), []
    for ask in asks:
        name = rng.choice(("", *ADAPTERS))
        adapter = adapter_of(name, f"/{name}") if name else None
        sampling = structs.replace(ask.sampling, adapter=adapter)
        found.append(replace(ask, sampling=sampling, salt=adapter.salted(ask.salt)) if adapter is not None else ask)
    return found


def _of_tenants(asks: Sequence[ScenarioRequest]) -> tuple[ScenarioRequest, ...]:
    """Let requests be of several tenants, in a few plans. Drawn from what was asked, as `_hurried` does."""
    rng = random.Random(f"tenants of {asks!r}")
    if rng.random() >= 0.15:
        return tuple(asks)
    weights = {tenant: rng.choice((1, 1, 3)) for tenant in ("a", "b", "c")[: rng.randint(2, 3)]}
    whose = [rng.choice(list(weights)) for _ in asks]
    return tuple(
        replace(ask, tenant=tenant, weight=weights[tenant]) for ask, tenant in zip(asks, whose, strict=True)
    )  # fmt: skip


def _hurried(asks: Sequence[ScenarioRequest]) -> tuple[ScenarioRequest, ...]:
    """Let first tokens of some requests be of use for a while only, in a few plans for most of them. Drawn from what
    was asked, so that all else of a plan stays as it was before there was this."""
    rng = random.Random(repr(asks))
    share = rng.choice((0.05, 0.05, 0.05, 0.6))
    return tuple(
        replace(ask, first_token_s=rng.choice((0.02, 0.1, 0.5, 2.0)) * rng.uniform(0.5, 1.5))
        if rng.random() < share
        else ask
        for ask in asks
    )


def _absences(rng: random.Random, asks: Sequence[ScenarioRequest]) -> tuple[PlannedFault, ...]:
    """Draw absences of the controller, in some plans: most are shorter than a lease. From numbers of their own, as
    `_drafted` does."""
    if rng.random() >= 0.3:
        return ()
    found = []
    for _ in range(rng.randint(1, 3)):
        at = rng.choice(asks).at + rng.expovariate(2.0) * rng.choice((-1, 1))
        lasts = rng.choice((rng.uniform(0.05, 0.8), rng.uniform(0.05, 0.8), rng.uniform(1.0, 5.0)))
        found.append(PlannedFault("controller", max(0.0, at), lasts=lasts))
    return tuple(found)


def _operations(rng: random.Random, shape: ClusterShape, asks: Sequence[ScenarioRequest]) -> tuple[PlannedFault, ...]:
    """Draw what happens to the pools as a whole, in some plans: some of it while a worker drains."""
    if rng.random() >= 0.3:
        return ()
    names = [f"{role}-{number}" for role, many in shape.workers.items() for number in range(many)]
    found = []
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.choice(OPERATIONS), max(0.0, rng.choice(asks).at + rng.expovariate(2.0) * rng.choice((-1, 1)))
        target = (
            "" if kind in WHOLE else f"node-{rng.randrange(shape.nodes)}" if kind == "cordon" else rng.choice(names)
        )
        lasts = rng.choice((rng.uniform(0.05, 0.8), rng.uniform(1.0, 6.0))) if kind in LASTING else 0.0
        if kind == "cutoff" and rng.random() < 0.5:
            lasts = rng.uniform(2.5, 9.0)
        found.append(PlannedFault(kind, at, target, lasts=lasts))
        if rng.random() < 0.4:
            found.append(
                PlannedFault("drain", at + rng.expovariate(2.0), rng.choice(names), lasts=rng.choice((0.1, 2.0)))
            )
    return tuple(found)


def _with_serving_changes(rng: random.Random, plan: Scenario) -> Scenario:
    """Have operators change what is served, in some plans: mostly the weights, some of which can't be had. Requests
    pause for a while then, in most of them; and in some phases a worker, the controller, a router or the supervisor
    dies."""
    if rng.random() >= 0.3:
        return plan
    shape, found = plan.shape, list[PlannedFault]()
    begin = rng.choice(plan.asks).at
    pause_s = rng.choice((0.0, 1.0, 3.0, 6.0))
    asks = tuple(_postponed(ask, pause_s) if ask.at >= begin else ask for ask in plan.asks)
    at = max(0.0, begin - rng.expovariate(2.0))
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choice(("weights",) * 6 + SERVING)
        wait_s, lasts = rng.choice((0.0, 0.2, 2.0, 30.0)), rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.0, 6.0)))
        rolling = kind == "weights" and rng.random() < 0.4
        path = rng.choice((*FOLDERS, *FOLDERS, "", UNREADABLE, UNLIKE))
        version = version_of(path) if path in FOLDERS and rng.random() < 0.5 else ""
        changes: dict[str, ServingChange] = {
            "weights": UpdateWeights(path, version, rolling, min(wait_s, 5.0) if rolling else wait_s),
            "flush": FlushCaches(wait_s),
            "pause": PauseCluster(),
            "sleep": SleepCluster(rng.choice((1, 2)), wait_s),
        }
        found.append(PlannedFault(kind, at, lasts=lasts if kind in LASTING else 0.0, change=changes[kind]))
        names = [f"{role}-{number}" for role, many in shape.workers.items() for number in range(many)]
        while rng.random() < 0.4:
            beside, when = rng.choice(("crash", "crash", "stop", "controller", "router", "supervisor", "drain")), at
            when += rng.expovariate(0.7)
            target = rng.choice(names) if beside in ("crash", "stop", "drain") else ""
            found.append(PlannedFault(beside, when, target, lasts=rng.uniform(0.05, 3.0) if beside in LASTING else 0.0))
        at += rng.choice((0.1, 1.0, 5.0)) * rng.expovariate(1.0)
    faults = sorted((*plan.faults, *found), key=lambda fault: fault.at)
    return replace(plan, asks=asks, faults=tuple(faults))


def _with_background(rng: random.Random, plan: Scenario) -> Scenario:
    """Have some requests of some plans be background, as those of batches are."""
    if rng.random() >= 0.2:
        return plan
    share, rows = rng.choice((0.3, 0.6)), rng.choice((0, 0, 1, 2))
    asks = tuple(
        replace(ask, priority=BACKGROUND, first_token_s=None) if rng.random() < share else ask for ask in plan.asks
    )
    config = plan.shape.config | {"decode": plan.shape.config["decode"] | {"background_rows": rows}}
    return replace(plan, shape=replace(plan.shape, config=config), asks=asks)


def _with_models(rng: random.Random, plan: Scenario) -> Scenario:
    """Have some plans' routers serve two or three models, each with faults of its own; some fall asleep when nobody
    asks."""
    if rng.random() >= 0.125:
        return plan
    models = {name: _of_model(rng, plan.shape, name) for name in MODELS[: rng.choice((1, 1, 1, 2))]}
    asks = [_asking(rng.choice((*models, rng.choice(("", *models)))), ask) for ask in plan.asks]
    faults = list(plan.faults)
    for name, shape in models.items():
        mine = [ask for ask in asks if ask.model == name]
        if mine:
            faults += [_struck(fault, name) for fault in _of_one_model(rng, shape, mine)]
    lead = plan.shape
    for name in ("", *models):
        if rng.random() < 0.5:
            sleepy = _sleepy(rng, models[name] if name else lead)
            lead, models = (lead, models | {name: sleepy}) if name else (sleepy, models)
            late = [rng.random() < 0.3 for _ in asks]
            later = [_postponed(ask, rng.choice((2.0, 4.0, 6.0))) for ask in asks]
            asks = [
                then if ask.model == name and is_late else ask
                for ask, then, is_late in zip(asks, later, late, strict=True)
            ]
    faults.sort(key=lambda fault: fault.at)
    return replace(plan, shape=lead, models=models, asks=tuple(asks), faults=tuple(faults))


def _of_model(rng: random.Random, lead: ClusterShape, name: str) -> ClusterShape:
    """Draw the cluster of another model, on the machines of the first one."""
    shape = _drafted(rng, _shape(rng, pressed=False))
    config = shape.config
    if "adapters" in lead.config:
        load = ",".join(f"{one}-{name}=/{one}" for one in ADAPTERS)
        config = config | {"adapters": lead.config["adapters"] | {"load": load}}
        config |= {role: config[role] | {"tp": 1} for role in ("prefill", "decode")}
    return replace(
        lead,
        prefill=rng.choice((1, 1, 2)),
        decode=min(shape.decode, 2),
        pools=shape.pools,
        page_tokens=shape.page_tokens,
        step_s=shape.step_s,
        pressed=False,
        config=config,
    )


def _asking(model: str, ask: ScenarioRequest) -> ScenarioRequest:
    """The request, asked of this model: for one of its own adapters, where it was for one."""
    adapter = ask.sampling.adapter
    if not model or adapter is None:
        return replace(ask, model=model)
    mine = adapter_of(f"{adapter.name}-{model}", adapter.path)
    return replace(ask, model=model, sampling=structs.replace(ask.sampling, adapter=mine))


def _of_one_model(rng: random.Random, shape: ClusterShape, asks: Sequence[ScenarioRequest]) -> list[PlannedFault]:
    """Draw what happens to one model's cluster alone."""
    found = (*_absences(rng, asks), *_operations(rng, shape, asks), *_faults(rng, shape, asks))
    changes = _with_serving_changes(rng, Scenario(0, shape, tuple(asks), ())).faults
    mine = [fault for fault in (*found, *changes) if fault.kind not in SHARED]
    return rng.sample(mine, min(len(mine), rng.choice((0, 1, 2, 4))))


def _struck(fault: PlannedFault, model: str) -> PlannedFault:
    """The fault, in the cluster of this model: it is its workers and its controller that are named."""
    other = f"{model}/{fault.other}" if fault.other and not fault.other.startswith(("router", "*")) else fault.other
    return fault if fault.target.startswith("router") else replace(fault, target=f"{model}/{fault.target}", other=other)


def _sleepy(rng: random.Random, shape: ClusterShape) -> ClusterShape:
    """Have a model's cluster fall asleep for want of requests."""
    sleep = {"sleep_after_s": rng.choice((0.5, 1.0, 2.0)), "sleep_level": rng.choice((1, 2))}
    wake = {"wake_timeout_s": rng.choice((4.0, 60.0, 60.0)), "wake_queue": rng.choice((1, 64, 64))}
    return replace(shape, config=shape.config | {"cluster": sleep, "router": wake})


def _postponed(ask: ScenarioRequest, by_s: float) -> ScenarioRequest:
    leaves_at = None if ask.leaves_at is None else ask.leaves_at + by_s
    reconnects = tuple(replace(one, at=one.at + by_s) for one in ask.reconnects)
    return replace(ask, at=ask.at + by_s, leaves_at=leaves_at, reconnects=reconnects)


def _of_several_routers(rng: random.Random, plan: Scenario) -> Scenario:
    """Have several routers in some plans, most of whose clients come back for the rest of an answer, and kill one of
    them now and then while answers run."""
    if rng.random() >= 0.35:
        return plan
    asks = tuple(replace(ask, keyed=_resumable(ask) and rng.random() < 0.8) for ask in plan.asks)
    routers = rng.choice((2, 2, 3))
    faults = list(plan.faults)
    for _ in range(rng.randint(1, 4)):
        at = rng.choice(asks).at + plan.shape.step_s * rng.randrange(30)
        faults.append(PlannedFault("router", at, f"router-{rng.randrange(routers)}"))
    faults.sort(key=lambda fault: fault.at)
    return replace(plan, shape=replace(plan.shape, routers=routers), asks=asks, faults=tuple(faults))


def _with_equal_keys(rng: random.Random, plan: Scenario) -> Scenario:
    """Have clients of some plans ask with their key again while their router lives: at once, while the answer is looked
    for, in its middle, or when it has ended."""
    if rng.random() >= (0.3 if plan.shape.routers > 1 else 0.1):
        return plan
    asks = []
    for ask in plan.asks:
        keyed = ask.keyed or (plan.shape.routers == 1 and _resumable(ask))
        times = rng.choice((0, 1, 1, 2, 4)) if keyed else 0
        pauses = [rng.choice((0.0, plan.shape.delay_s, rng.expovariate(2.0))) for _ in range(times)]
        ats = [ask.at + sum(pauses[: n + 1]) for n in range(times)]
        reconnects = tuple(Reconnect(at, rng.choice((0.0, 0.02, 1.0))) for at in ats)
        asks.append(replace(ask, keyed=keyed, reconnects=reconnects))
    return replace(plan, asks=tuple(asks))


def _resumable(ask: ScenarioRequest) -> bool:
    """Whether an answer can be kept and its client is one that waits."""
    patient = ask.first_token_s is None and ask.deadline_s == 600.0 and ask.enough is None
    return patient and ask.sampling.prompt_logprobs is None


def _faults(rng: random.Random, shape: ClusterShape, asks: Sequence[ScenarioRequest]) -> tuple[PlannedFault, ...]:
    """Draw faults: none in some plans; in others of a few kinds only, so that these kinds coincide."""
    count = rng.choice((0, 2, 5, 10, 16))
    names = [f"prefill-{n}" for n in range(shape.prefill)] + [f"decode-{n}" for n in range(shape.decode)]
    kinds = rng.sample([kind for kind in KINDS if kind not in ("controller", *OPERATIONS, *SERVING)], rng.randint(1, 5))
    ends = [*names, "router-0"]
    for role, many in (("prefill", shape.prefill), ("decode", shape.decode)):
        ends += [f"{role}-{n}.rank{rank}" for n in range(many) for rank in range(1, shape.config[role]["tp"])]
    faults = []
    for _ in range(count):
        kind = rng.choice(kinds)
        # A time at which requests are in flight.
        at = rng.choice(asks).at + rng.expovariate(2.0)
        lasts = rng.choice((0.05, 0.5, 2.0, 6.0)) * rng.uniform(0.5, 1.5)
        target, other = rng.sample(ends, 2) if kind in PAIRS else (rng.choice(names), "")
        if kind == "halt":
            # Decode writes only to what it hands on. Some stand still until they are killed, or beyond that.
            target = rng.choice(names[: shape.prefill])
            lasts = rng.choice((rng.uniform(0.3, 3.5), rng.uniform(4.0, 14.0)))
        if kind in WHOLE:
            target = ""
        if kind == "partition":
            target, other = f"node-{rng.randrange(shape.nodes)}", "*"
        faults.append(PlannedFault(kind, at, target, other, lasts if kind in LASTING else 0.0))
    if shape.decode > 1 and rng.random() < 0.4:
        # While requests run there, and another decode worker could take them.
        at = rng.choice(asks).at + shape.step_s * rng.randrange(20)
        faults.append(
            PlannedFault("drain", at, f"decode-{rng.randrange(shape.decode)}", "", rng.choice((0.1, 0.5, 2.0)))
        )
    if "rank" not in kinds and len(ends) > len(names) + 1 and rng.random() < 0.3:
        faults.append(PlannedFault("rank", rng.choice(asks).at + rng.expovariate(2.0), rng.choice(names)))
    return tuple(sorted(faults, key=lambda f: f.at))
