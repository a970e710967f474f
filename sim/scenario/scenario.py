"""The plan that a seed stands for: a cluster, its clients' requests, and faults.

A plan is a value, separate from its run. So a failing plan can be made smaller (`twinpool sim --shrink`) and run again,
and draws of a run (delays, say) come from another random stream than the draws of its plan.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolKind, PoolSetSpec, PoolSpec
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.pool_changes import ServingChange
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.sim.fabric.hash_answers import STATE_PLACES, VOCABULARY
from twinpool.sim.fabric.virtual_time import StepCosts

CONTEXT = 96
FOLDERS = ("/weights/one", "/weights/two")
UNREADABLE, UNLIKE = "/weights/unreadable", "/weights/unlike"
"""A folder that workers of odd numbers can't read, and one of which they find other files than the others."""


def digest_of(path: str, number: int = 0) -> str:
    """The digest of the weights in a folder, as worker `number` finds them. Raises `CheckpointError`."""
    if path == UNREADABLE and number % 2:
        raise CheckpointError(f"{path} can't be read")
    return hashlib.sha256(f"{path} {number % 2 if path == UNLIKE else 0}".encode()).hexdigest()


def adapter_of(name: str, path: str) -> AdapterRef:
    """The adapter in a folder, under a name."""
    return AdapterRef(name, path.strip("/") * 8, path)


def version_of(path: str) -> str:
    """The version by which an operator names the weights in a folder."""
    return path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Reconnect:
    """A client with a key asks again on another connection, while the router of the one before lives."""

    at: float
    noticed_s: float
    """Seconds until the router of the connection before sees that nobody reads it any more. Until then two routers, or
    one of them twice, have a client for one answer."""


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """One client's request."""

    number: int
    at: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    leaves_at: float | None = None
    """The time at which the client hangs up, if it still waits; None: never."""
    enough: int | None = None
    """The client stops the request after so many tokens, as a stop string does; None: never."""
    deadline_s: float = 600.0
    first_token_s: float | None = None
    """Seconds to the first token beyond which the answer is of no use to the client; None: it is patient."""
    tenant: str = field(default="", repr=False)
    """Whose it is. Not in its text, from which other draws are made."""
    weight: int = field(default=1, repr=False)
    keyed: bool = field(default=False, repr=False)
    """Whether it has an Idempotency-Key: its client asks another router for the rest when its own is gone."""
    reconnects: tuple[Reconnect, ...] = field(default=(), repr=False)
    """Of a keyed one."""
    model: str = field(default="", repr=False)
    """The model that is asked, of `Scenario.models`; empty: the first."""

    @property
    def background(self) -> bool:
        return self.priority <= BACKGROUND


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault, or an operator's action, of one of `KINDS`."""

    kind: str
    at: float
    target: str = ""
    other: str = ""
    lasts: float = 0.0
    change: ServingChange | None = None
    """What an operator changes of what is served; None: nothing."""

    @property
    def model(self) -> str:
        """The model in whose cluster it strikes: what its target has before a slash. Empty: the first, or all."""
        return self.target.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Its target, as the model's cluster calls it."""
        return self.target.rpartition("/")[2]

    def __str__(self) -> str:
        between = f" and {self.other}" if self.other else ""
        what = self.target if self.change is None else str(self.change)
        return f"{self.kind} {what}{between}" + (f" for {self.lasts:.2f} s" if self.lasts else "")


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The size, state, configuration and speed of the cluster."""

    prefill: int
    decode: int
    pools: str
    """The pools that the model keeps: ``full``, ``window``, ``state`` or ``all``."""
    page_tokens: int
    plane: str
    adversarial: bool
    """Whether devices run operations late, in any order that is allowed."""
    delay_s: float
    step_s: float
    nodes: int
    kill_s: float = 2.0
    """Seconds that a node may take for a kill, so that a worker may live on beside its next incarnation."""
    pressed: bool = False
    """Whether requests ask more of decode at once than its pools can hold."""
    routers: int = 1
    colocated: int = 0
    """Colocated workers instead of the two pools; 0: none."""
    config: dict[str, Any] = field(default_factory=dict)
    costs: StepCosts | None = None
    """What steps take by what they compute, their results at their end; None: any step takes about `step_s`, and its
    results are there at its beginning."""

    @property
    def workers(self) -> dict[Role, int]:
        """How many workers there are of each role."""
        if self.colocated:
            return {Role.COLOCATED: self.colocated}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A plan: a cluster, its requests and its faults."""

    seed: int
    shape: ClusterShape
    asks: tuple[ScenarioRequest, ...]
    faults: tuple[PlannedFault, ...]
    models: dict[str, ClusterShape] = field(default_factory=dict)
    """Further models behind the same routers, each with a cluster of its own, by name."""

    @property
    def shapes(self) -> dict[str, ClusterShape]:
        """The clusters of all models; the first one's name is empty."""
        return {"": self.shape, **self.models}


def pool_set(name: str, page_tokens: int) -> PoolSetSpec:
    """Make a small pool set: a few bytes a position and kind of state, some with heads that ranks divide."""
    u8 = torch.uint8
    full = PoolSpec("full", (BufferSpec("kv", 2, (4, 2), u8, heads=4),))
    window = PoolSpec("window", (BufferSpec("kv", 1, (2, 4), u8, heads=2),), PoolKind.WINDOW, 7)
    state = PoolSpec("state", (BufferSpec("s", 1, (STATE_PLACES, 16), u8, IndexSpace.SLOT),), PoolKind.STATE)
    chosen = {"full": (full,), "window": (full, window), "state": (full, state), "all": (full, window, state)}
    return PoolSetSpec(page_tokens, chosen[name])


_SOME = tuple(t for t in range(VOCABULARY) if t % 4 != 1)


def sampling_of(rng: random.Random, prompt: int, most: int) -> SamplingParams:
    """Draw the sampling parameters of a request; half of the requests have plain ones."""
    stops = tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 4))))
    sampling = SamplingParams(most, seed=rng.randrange(1 << 32), stop_token_ids=stops)
    if sampling.seed % 6 == 5:
        sampling = replace(sampling, grammar=str(sampling.seed))
    if rng.random() < 0.5:
        return sampling
    scored = prompt > 1 and rng.random() < 0.2
    if scored and rng.random() < 0.2:
        sampling, most = replace(sampling, max_tokens=0), 0
    return replace(
        sampling,
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=rng.choice((0.9, 1.0, 1.0)),
        top_k=rng.choice((0, 0, 40)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.4)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, -0.2)),
        logit_bias=rng.choice(((), (), ((3, -1.5), (41, 2.25)))),
        allowed_token_ids=_SOME if sampling.seed % 4 == 0 and not sampling.grammar else (),
        min_tokens=rng.randint(0, most) if rng.random() < 0.5 else 0,
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((0, 2)) if scored else None,
    )


def rush(rng: random.Random, shape: ClusterShape, first: int, at: float) -> list[ScenarioRequest]:
    """Draw requests with short answers, from which decode learns lengths, then many with longer ones at once."""
    asks = []
    short = shape.decode * rng.randint(8, 9)
    for number in range(short + shape.decode * rng.randint(4, 7)):
        long = number >= short
        at += 0.0 if long else 0.05 * rng.random()
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12)))
        sampling = replace(sampling_of(rng, len(prompt), rng.randint(16, 24) if long else 2), stop_token_ids=())
        asks.append(
            ScenarioRequest(first + number, at + (1.0 if long else 0.0), prompt, sampling, "", rng.choice((0, 0, 5)))
        )
    return asks


PAIRS = ("reset", "stall")
"""Faults between two processes."""
WHOLE = (
    "router", "controller", "cutoff", "supervisor", "apply", "errors", "rot", "forget", "slow", "corrupt", "metadata",
    "notice",
)  # fmt: skip
"""Faults of the whole cluster."""
LASTING = (
    "controller", "cutoff", "supervisor", "add", "cordon", "stop", "halt", "stall", "partition", "errors", "slow",
    "drain", "pause", "sleep",
)  # fmt: skip
SERVING = ("weights", "flush", "pause", "sleep")
"""Operators' changes of what the whole cluster serves. Drawn apart, as operations are."""
OPERATIONS = ("cutoff", "supervisor", "restart", "add", "cordon", "apply")
"""What happens to the pools as a whole. Drawn apart from the others, as the controller's absences are."""
KINDS = {
    "crash": "a worker's process dies",
    "stop": "a worker's process stands still for a while",
    "hang": "a worker's loop hangs for ever, while its lease is renewed",
    "halt": "a worker's process stands still in the middle of its next write, for a while",
    "router": "a router's process dies and is started again; its clients ask another one, where there is one",
    "controller": "the controller's process dies and is started again after a while",
    "cutoff": "the controller reaches nobody for a while, often for longer than a lease",
    "supervisor": "the supervisor dies and is started again after a while",
    "restart": "an operator restarts a worker, by drain",
    "add": "an operator adds a worker, and scales the pool back after a while",
    "cordon": "an operator cordons a node for a while",
    "apply": "an operator changes settings, for which all workers restart one by one",
    "weights": "an operator changes the weights, of all workers at once or one by one, or changes them back",
    "flush": "an operator flushes all caches",
    "pause": "an operator pauses the cluster for a while",
    "sleep": "an operator puts the cluster to sleep for a while",
    "drain": "an operator drains a worker, and takes it back after a while if it is still there",
    "role": "an operator has a worker change its role",
    "stall": "two processes don't reach each other for a while",
    "partition": "a node reaches no other for a while",
    "reset": "the connections between two processes are reset",
    "slow": "the network is twenty times as slow for a while",
    "rank": "the process of another rank of a worker dies",
    "corrupt": "a byte of the next write of pages flips on its way",
    "metadata": "a byte of the next metadata flips on its way",
    "notice": "a byte of the next notice of a data plane flips on its way",
    "flip": "a byte of every page in a worker's host memory flips",
    "errors": "storage fails one operation in three for a while",
    "rot": "a byte of an object on storage flips",
    "forget": "storage loses all objects",
}
