"""Prefill of several ranks sends layer by layer: real followers, which send beside what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle
from tests.support.model_families import EVERY
from tests.support.rank_followers import RankProcesses
from tests.support.worker_pair import pair
from tests.workers.test_layered_sends import BY_LAYER, answers_are_the_oracles, layered, prompts
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_port import Device, DeviceStream
from twinpool.contracts.ids import Role


def sends_beside() -> AsyncCpuDevice:
    return AsyncCpuDevice(beside=(DeviceStream.SEND,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plane", "prefill", "decode"),
    [
        ("shm", 2, 1), ("shm", 1, 2), ("zmq", 2, 1), ("zmq", 2, 2), ("nixl", 2, 1), ("nixl", 1, 2), ("nixl", 2, 2),
        ("staged", 2, 1), ("staged", 1, 2), ("staged", 2, 2),
    ],
)  # fmt: skip
def test_layers_of_ranks_are_what_was_computed(
    model: Path, oracle: Oracle, warm: RankProcesses, plane: str, prefill: int, decode: int
) -> None:
    devices: dict[Role, Device] = {Role.PREFILL: sends_beside(), Role.DECODE: CpuDevice()}
    sections: dict[str, Any] = {
        "engine": {"threads": 1, "copy_threads": "on"},
        "transfer": {"plane": plane, **BY_LAYER},
        "prefill": {"chunk_tokens": 96, "tp": prefill},
        "decode": {"tp": decode},
    }
    with pair(model, tokens=2048, devices=devices, ranks=warm, **sections) as both:
        asked = prompts(1, 16, 17, 97, 200)
        answers_are_the_oracles(both, oracle, *asked)
        assert layered(both) == sum(-(-len(prompt) // 16) for prompt in asked)
        assert both.decode.status().counters["pages_damaged"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plane", "prefill", "decode"),
    [
        ("shm", {"pp": 2}, {}), ("shm", {}, {"pp": 2}), ("shm", {"pp": 2}, {"tp": 2}), ("zmq", {"pp": 2}, {}),
        ("zmq", {"tp": 2}, {"pp": 2}), ("nixl", {"pp": 2}, {}), ("staged", {"pp": 3}, {"pp": 2}),
    ],
)  # fmt: skip
def test_each_stages_layers_leave_after_its_own_marks(
    tmp_path: Path, warm: RankProcesses, plane: str, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    folder = EVERY["llama"](tmp_path / "model", layers=5)
    devices: dict[Role, Device] = {Role.PREFILL: sends_beside(), Role.DECODE: CpuDevice()}
    sections: dict[str, Any] = {
        "engine": {"threads": 1, "copy_threads": "on"},
        "transfer": {"plane": plane, **BY_LAYER},
        "prefill": {"chunk_tokens": 96, **prefill},
        "decode": decode,
    }
    with pair(folder, tokens=2048, devices=devices, ranks=warm, **sections) as both:
        asked = prompts(1, 16, 17, 97, 200)
        answers_are_the_oracles(both, Oracle(folder), *asked)
        assert layered(both) == sum(-(-len(prompt) // 16) for prompt in asked)
        assert both.decode.status().counters["pages_damaged"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_followers_that_do_one_thing_after_the_other_keep_to_a_late_leader(
    model: Path, oracle: Oracle, warm: RankProcesses, seed: int
) -> None:
    devices: dict[Role, Device] = {Role.PREFILL: AdversarialDevice(seed), Role.DECODE: CpuDevice()}
    sections: dict[str, Any] = {"transfer": {"plane": "shm", **BY_LAYER}, "prefill": {"chunk_tokens": 48, "tp": 2}}
    with pair(model, devices=devices, ranks=warm, **sections) as both:
        answers_are_the_oracles(both, oracle, *prompts(seed, 100, 33, 64))
        assert layered(both) > 0
        assert both.decode.status().counters["pages_damaged"] == 0


@pytest.mark.slow
def test_where_a_buffer_has_fewer_layers_than_its_pool_no_layer_leaves_before_it_is_computed(tmp_path: Path) -> None:
    """GLM-5 keeps index keys in every second layer, in the pool of the latents of all."""
    folder = EVERY["glm5"](tmp_path / "model")
    devices: dict[Role, Device] = {Role.PREFILL: sends_beside(), Role.DECODE: CpuDevice()}
    sections: dict[str, Any] = {
        "engine": {"threads": 1, "copy_threads": "on"},
        "transfer": {"plane": "shm", **BY_LAYER},
        "prefill": {"chunk_tokens": 96},
    }
    with pair(folder, tokens=2048, devices=devices, **sections) as both:
        asked = prompts(1, 33, 97, 200)
        answers_are_the_oracles(both, Oracle(folder), *asked)
        assert layered(both) == 0
        assert both.decode.status().counters["pages_damaged"] == 0
