"""A client of a run: what it asked, and what it has got."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.contracts.ids import RequestId
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.sim.fabric.hash_engine import ExpectedAnswer
from twinpool.sim.nodes.sim_router import SimRouter
from twinpool.sim.scenario.scenario import ScenarioRequest


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
