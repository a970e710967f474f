"""The fast simulator says what the full one says: the same requests, on one prefill and two decode workers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.sim.fabric.virtual_time import StepCosts
from twinpool.sim.run.run_scenario import ScenarioRun
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.traffic import SimRequest
from twinpool.sim.scenario.scenario import ClusterShape, Scenario, ScenarioRequest

PAGE, CHUNK, TOKENS, ROWS = 4, 16, 4096, 16
COSTS = StepCosts(
    prefill_base_s=0.01,
    prefill_token_s=0.004,
    prefill_pair_s=2e-5,
    decode_base_s=0.01,
    decode_row_s=0.0015,
    decode_context_s=4e-5,
    handover_base_s=0.002,
    handover_token_s=0.0,
    message_s=0.0002,
)
SHAPE = ClusterShape(
    1, 2, "full", PAGE, "shm", False, COSTS.message_s, 0.02, 1,
    config={
        "cache": {"page_tokens": PAGE, "arena": "none"},
        "router": {"policy": "round_robin", "replay_limit": 100, "worker_wait_s": 120.0},
        "prefill": {"chunk_tokens": CHUNK, "cache": {"device_tokens": TOKENS, "device_requests": 8}},
        "decode": {
            "max_batch_tokens": ROWS, "metadata_slots": 64, "speculation": "off",
            "cache": {"device_tokens": TOKENS, "device_requests": 8},
        },
        "audit": {"fraction": 0.0},
        "faults": {"retract_every": 0},
    },
    costs=COSTS,
)  # fmt: skip


def asked(count: int, rate: float) -> tuple[ScenarioRequest, ...]:
    """Requests of which half begin with the same pages, `rate` a second."""
    rng, at, asks = random.Random(f"{count} {rate}"), 1.0, []
    system = tuple(rng.randrange(64) for _ in range(3 * PAGE))
    for number in range(count):
        at += rng.expovariate(rate)
        begin = system if rng.random() < 0.5 else ()
        prompt = begin + tuple(rng.randrange(64) for _ in range(rng.randint(4, 56)))
        asks.append(ScenarioRequest(number, at, prompt, SamplingParams(rng.randint(4, 24), seed=number)))
    return tuple(asks)


class TimedRun(ScenarioRun):
    """A full run that notes when each token came to its client."""

    def __init__(self, plan: Scenario) -> None:
        self.came: dict[int, list[float]] = {}
        super().__init__(plan)
        self.clients.on_told = self._told

    def _told(self, ask: ScenarioRequest, count: int) -> None:
        self.came.setdefault(ask.number, []).extend([self.agenda.now()] * count)


Figures = dict[str, float]


def told(name: str, seconds: NDArray[np.float64]) -> Figures:
    figures = {f"{name} p{share}": float(np.percentile(seconds, share)) for share in (10, 50, 90)}
    return figures | {f"{name} mean": float(seconds.mean())}


@pytest.mark.slow
@pytest.mark.parametrize("rate", [3.0, 5.0], ids=["half idle", "all but full"])
def test_latencies_and_hits_are_within_five_per_cent(rate: float) -> None:
    asks = asked(100, rate)
    full = TimedRun(Scenario(1, SHAPE, asks, ()))
    result = full.run()
    assert not result.violations
    came = [full.came[ask.number] for ask in asks]
    gaps = np.concatenate([np.diff(times) for times in came])
    hits = sum(host.snapshot.counters["hit_tokens_device"] for host in full.control.all_hosts if host.role == "prefill")
    want = told("ttft", np.array([times[0] - ask.at for times, ask in zip(came, asks, strict=True)]))
    want |= told("answer", np.array([times[-1] - ask.at for times, ask in zip(came, asks, strict=True)]))
    # Of single gaps the median and the mean: a step of three rows is a tenth longer than one of two, so that other
    # quantiles jump by as much.
    want |= told("tpot", np.array([np.diff(times).mean() for times in came]))
    want |= {"itl p50": float(np.percentile(gaps, 50)), "itl mean": float(gaps.mean())}
    want |= {"hits": hits / sum(len(ask.prompt) for ask in asks)}
    want |= {"tokens a second": sum(map(len, came)) / max(times[-1] for times in came)}

    def requests() -> Iterator[SimRequest]:
        for ask, times in zip(asks, came, strict=True):
            keys = prefix_hashes(ask.prompt, "", PAGE).pages.tolist()
            yield SimRequest(ask.at, len(ask.prompt), len(times), ask.sampling.max_tokens, keys, "")

    plan = ClusterPlan(
        PrefillPool(1, TOKENS, chunk_tokens=CHUNK),
        DecodePool(2, TOKENS, ROWS),
        COSTS,
        block_tokens=PAGE,
        config=config_from_dict({"router": {"policy": "round_robin"}, "cache": {"page_tokens": PAGE}}),
    )
    fast = ClusterModel(plan, requests())
    fast.run()
    fast.close()
    assert fast.check() == []
    figures, report = fast.figures, fast.report()
    got = told("ttft", np.array(figures.ttft_s, np.float64)) | told("answer", np.array(figures.answer_s, np.float64))
    got |= told("tpot", np.array(figures.tpot_s, np.float64))
    got |= {"itl p50": figures.gaps.quantile(0.5), "itl mean": figures.gaps.sum_s / figures.gaps.total}
    got |= {"hits": report.hit_rate, "tokens a second": report.tokens_per_s}
    assert got == pytest.approx(want, rel=0.05)
