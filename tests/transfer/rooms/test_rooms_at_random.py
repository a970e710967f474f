"""Rooms in every order that can happen; see `tests/support/room_chaos.py`."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.pool_sets import NAMES, pool_sets
from tests.support.room_chaos import play
from tests.support.room_ends import PLANES, ends, simulated_ends
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.sim.fabric.plane_faults import StoreFault, StoreFaults

SETS = pool_sets()
HAPPENS = {"opened", "given up", "rotten", "damaged", "PromptArrived", "HandoverFailed", "PromptAnswered"}


@pytest.mark.slow
@pytest.mark.parametrize(("plane", "nodes"), [("shm", 1), ("zmq", 1), ("nixl", 1), ("nixl", 2), ("staged", 1)])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_who_arrives_has_what_was_sealed_and_everything_comes_back(
    name: str, plane: str, nodes: int
) -> None:
    """Over the simulator's network, so that a seed is one run: what happens, and how often, is the same everywhere.
    One-sided writes fail, are cut off and are overtaken besides, on one node and between two."""
    seen: Counter[str] = Counter()
    befell: Counter[str] = Counter()
    for seed in range(8):
        device, faults = AdversarialDevice(seed), StoreFaults(random.Random(f"stores {seed}"), 0.1)
        places = ("node-0", f"node-{nodes - 1}")
        with simulated_ends(
            SETS[name], plane, seed=seed, count=20, slots=5, device=device, store_faults=faults, nodes=places
        ) as both:
            seen += play(both, device, seed, 600)
        befell += faults.done
    assert seen.keys() >= HAPPENS, seen
    assert seen["opened"] > 100, seen
    assert befell.keys() == (set(StoreFault) if plane == "nixl" else set()), befell


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_over_real_sockets_everything_comes_back(name: str, plane: str) -> None:
    """How much arrives in so many steps is up to the machine here; what is checked is so whatever arrives."""
    for seed in range(2):
        assert run(name, plane, seed, 400)["opened"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_in_a_long_time(name: str, plane: str) -> None:
    for seed in range(100, 150):
        run(name, plane, seed, 600)


def run(name: str, plane: str, seed: int, steps: int) -> Counter[str]:
    device = AdversarialDevice(seed)
    with ends(SETS[name], plane, seed=seed, count=20, slots=5, device=device) as both:
        return play(both, device, seed, steps)


def test_a_seed_over_the_simulated_network_is_one_run() -> None:
    seen = []
    for _ in range(2):
        device = AdversarialDevice(5)
        with simulated_ends(SETS["full"], "shm", seed=5, count=20, slots=5, device=device) as both:
            seen.append(play(both, device, 5, 300))
    assert seen[0] == seen[1]
    assert seen[0]["PromptArrived"] > 0
