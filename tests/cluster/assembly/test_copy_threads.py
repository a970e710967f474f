"""Copies and sends of a worker on a CPU have threads where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.worker_pair import counts_for
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.assembly.node_shares import copies_beside
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.load_config import config_from_dict, load_config
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.prefill.worker import PrefillWorker


@pytest.mark.parametrize(("asked", "device"), [("on", AsyncCpuDevice), ("off", CpuDevice), ("auto", CpuDevice)])
def test_a_worker_of_one_rank_has_them_as_configured(asked: str, device: type, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3", layers=1)
    config = config_from_dict({"engine": {"threads": 1, "copy_threads": asked}, "transfer": {"plane": "local"}})
    worker = build_worker(
        Role.PREFILL, WorkerName("prefill-0"), Incarnation(1), read_model_spec(folder), config, host="127.0.0.1",
        clock=SystemClock(), counts=counts_for(folder, config, Role.PREFILL, 256),
    )  # fmt: skip
    try:
        assert isinstance(worker, PrefillWorker)
        assert type(worker.setup.engine.device) is device
    finally:
        worker.close()


@pytest.mark.parametrize(("asked", "cores", "found"), [
    ("auto", 2, False), ("auto", 4, False), ("auto", 5, True), ("on", 2, True), ("off", 64, False),
])  # fmt: skip
def test_auto_has_them_where_cores_are_left_beside_those_that_compute(asked: str, cores: int, found: bool) -> None:
    config = config_from_dict({"engine": {"copy_threads": asked}})
    assert copies_beside(config, cores, 4) is found


def test_the_key_takes_yes_and_no_as_yaml_has_them() -> None:
    """`on` and `off` are such words, too."""
    for key in ("copy_threads", "graphs"):
        for said, meant in (("true", "on"), ("on", "on"), ("false", "off"), ("off", "off"), ("auto", "auto")):
            assert getattr(load_config(None, [f"engine.{key}={said}"]).engine, key) == meant
