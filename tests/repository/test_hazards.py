"""Every hazard has a test that bears its name; and some of those tests."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.router.stage import Stage
from tests.support.worker_parts import migrating, retracted, scheduler_of, table_of
from tests.workers.test_any_state import hash_pair
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.migration.outgoing_migrations import MigrationStage as Departing
from twinpool.decode.worker import DecodeWorker
from twinpool.sim.fabric.hash_answers import VOCABULARY
from twinpool.sim.run.run_scenario import ScenarioRun
from twinpool.sim.scenario.scenario import ClusterShape, PlannedFault, Scenario, ScenarioRequest

TESTS = Path(__file__).parents[1]
HAZARDS = [f"{group}{n}" for group, last in (("a", 12), ("b", 10), ("c", 11), ("d", 10)) for n in range(1, last + 1)]


def test_every_hazard_has_a_test_that_bears_its_name() -> None:
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        named |= set(re.findall(r"^\s*(?:async )?def test_([a-d]\d+)_", path.read_text(), re.MULTILINE))
    assert [hazard for hazard in HAZARDS if hazard not in named] == []
    assert not [name for name in named if name not in HAZARDS], "there is no such hazard"


def queues_of(decode: DecodeWorker) -> dict[str, list[int]]:
    """Every list of a decode worker that owns requests, by the phase that it is for."""
    retraction = scheduler_of(decode).retraction
    lists = {
        "waiting": scheduler_of(decode).waiting,
        "running": scheduler_of(decode).running,
        "retracting": retraction._leaving,
        "retracted": retracted(decode),
        "resuming": retraction._coming,
        "leaving": [d.request for d in migrating(decode).values() if d.stage is not Departing.STOPPING],
    }
    return {name: [id(request) for request in requests] for name, requests in lists.items()}


def misplaced(decode: DecodeWorker) -> list[str]:
    """Requests that aren't in exactly the one queue that their phase names; what arrives is in none."""
    queues, found = queues_of(decode), []
    for request in table_of(decode):
        there = [name for name, queue in queues.items() for one in queue if one == id(request)]
        if there != ([] if request.phase == "arriving" else [str(request.phase)]):
            found.append(f"{request.submit.request_id} is {request.phase} and in {there}")
    known = {id(request) for request in table_of(decode)}
    return found + [f"a request that has ended is in {name}" for name, q in queues.items() if set(q) - known]


def a_busy_life(adversarial: bool) -> Scenario:
    """Two decode workers: everybody is retracted again and again, moves with each short drain, and some leave."""
    rng = random.Random(6)
    cache = {"page_tokens": 4, "host_bytes": 1 << 16}
    config = {
        "cache": cache,
        "prefill": {"cache": {"device_tokens": 800, "device_requests": 8}},
        "decode": {"cache": {"device_tokens": 480, "device_requests": 8}, "retract": "copy"},
        "faults": {"retract_every": 7},
    }
    asks = []
    for number in range(24):
        at = 0.5 + 0.05 * number
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30)))
        leaves_at = at + 0.8 * rng.random() if number % 5 == 0 else None
        asks.append(ScenarioRequest(number, at, prompt, SamplingParams(24, seed=number), leaves_at=leaves_at))
    # What a late device has still to look at holds a migration up.
    lasts = 1.2 if adversarial else 0.2
    drains = [PlannedFault("drain", 0.9 + 0.5 * n, f"decode-{n % 2}", lasts=lasts) for n in range(10)]
    shape = ClusterShape(
        1, 2, "all", 4, "shm", adversarial=adversarial, delay_s=0.0002, step_s=0.04, nodes=1, config=config
    )
    return Scenario(6, shape, tuple(asks), tuple(drains))


@pytest.mark.slow
@pytest.mark.parametrize("adversarial", [False, True])
def test_c6_a_request_is_in_exactly_one_queue_whatever_happens_to_it(adversarial: bool) -> None:
    """Its phase names the queue. Throughout the life of a cluster in which all is retracted and moved, the lists
    themselves are counted; what a worker's own `check()` says isn't asked."""
    run, looked, found = ScenarioRun(a_busy_life(adversarial)), Counter[str](), list[str]()
    events = 0

    def look() -> bool:
        nonlocal events
        events += 1
        for host in run.control.all_hosts if events % 4 == 0 else []:
            if isinstance(host.worker, DecodeWorker) and host.ended is None:
                found.extend(misplaced(host.worker))
                looked.update(name for name, queue in queues_of(host.worker).items() if queue)
        return bool(found)

    result = run.run(until=look)
    assert found == []
    assert result.violations == ()
    assert result.counts["retractions"] > 50, result.counts
    assert result.counts["migrated"] > (0 if adversarial else 5), result.counts
    assert result.counts["left"] > 3, result.counts
    # On a late device copies take a while, and whoever is away or on its way back is seen there.
    assert looked.keys() >= ({"resuming"} if adversarial else {"waiting", "running", "retracting", "leaving"})


def test_c6_a_request_in_two_queues_is_found() -> None:
    with hash_pair("full", dict.fromkeys(Role, 40)) as both:
        request = both.submit(list(range(9)), SamplingParams(max_tokens=20, temperature=0.0))
        while len(both.answers[request].tokens) < 3:
            both.step()
        (running,) = scheduler_of(both.decode).running
        scheduler_of(both.decode).waiting.append(running)
        assert any("in that queue" in v for v in both.decode.check().violations)
        scheduler_of(both.decode).waiting.clear()
        both.cancel(request)


def test_c7_a_worker_gets_nothing_before_it_has_registered_and_is_reached() -> None:
    stage = Stage()
    stage.kill("decode-0")
    stage.cluster["decode-0"].restart()
    stage.cluster["decode-0"].state = "starting"
    stage.view()
    stage.link("decode-0")
    for _ in range(4):
        stage.submit()
    assert {w[0] for w, _ in stage.submits if w[0].startswith("decode")} == {"decode-1"}
    stage.cluster["decode-0"].state = "ready"
    stage.view()
    stage.submit()
    assert stage.submits[-2][0][0] == "decode-0"


def test_c7_a_worker_is_not_there_before_all_of_its_ranks_are() -> None:
    """Its leader waits for the others before it builds anything, and ends when one doesn't come."""
    from twinpool.cluster.ranks import FollowerChannel, LeaderChannel

    secret = "5a" * 32
    clock = ManualClock()
    line = LeaderChannel(secret, 3, clock, 1.0)
    first = FollowerChannel(secret, 1)
    try:
        clock.advance(1.0)
        with pytest.raises(PeerDead, match="of 3 did not come within 0 s"):
            line.meet(0.0)
    finally:
        first.close()
        line.close()
