"""A client of a run: what it asked, and what it has got."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import RequestId
from contracts.sampling_params import TokenLogprob
from sim.fabric.hash_engine import ExpectedAnswer
from sim.nodes.sim_router import SimRouter
from sim.scenario.scenario import ScenarioRequest


@dataclass
class SimClient:
    """One request as its client sees it."""

    ask: ScenarioRequest
    expected: ExpectedAnswer
    request_id: RequestId | None = None
    router: SimRouter | None = None
    """The one that it has asked last."""
    tries: int = 0
    asked: float = 0.0
    """When it was asked last."""
    got: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: tuple[TokenLogprob, ...] | None = None
    over: bool = False
