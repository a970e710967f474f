"""A worker that can't be built leaves nothing behind: no thread, no socket, no shared memory, whichever part failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.worker_pair import counts_for
from twinpool.cluster.assembly.build_worker import build_rank, build_worker
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.engine.tensors.tensor_parallel import ALONE

PARTS = "twinpool.cluster.assembly.build_parts."
WORKER = "twinpool.cluster.assembly.build_worker."
BUILDS = 4


class Broken(Exception):
    """What a part raises that can't be built."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


def held() -> tuple[int, list[str], list[str]]:
    """What this process holds: descriptors, storage threads, and files of shared memory."""
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("storage-"))
    return len(os.listdir("/proc/self/fd")), threads, sorted(f for f in os.listdir("/dev/shm") if f"{os.getpid()}" in f)


def failing(*_: object, **__: object) -> None:
    raise Broken


def fails_and_leaves_nothing(build: Callable[[], object], monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """`BUILDS` builds that fail at `part` leave fewer descriptors than one for each of them."""
    monkeypatch.setattr(part, failing)
    with pytest.raises(Broken) as caught:
        build()  # What a process makes once, such as ZeroMQ's threads, is there from now on.
    descriptors, threads, memory = held()
    assert not threads
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("grammars")]:
        thread.join(60)  # It ends with the vocabulary that it is reading.
        assert not thread.is_alive(), f"{thread.name} has no end while {caught.value!r} keeps what was built"
    for _ in range(BUILDS):
        with pytest.raises(Broken):
            build()
    deadline = time.monotonic() + 60
    while (now := held())[0] >= descriptors + BUILDS or now[1:] != (threads, memory):
        # ZeroMQ closes sockets in a thread of its own.
        assert time.monotonic() < deadline, (now, descriptors, memory)


def config_of(plane: str, tmp_path: Path) -> Config:
    """Everything on that a worker may hold: a host tier, storage, KV events."""
    storage = {"backend": "file", "path": str(tmp_path / "store"), "max_bytes": 1 << 24}
    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    cache = {"host_bytes": 1 << 22, "storage": storage, "events": events}
    return config_from_dict({"transfer": {"plane": plane}, "engine": {"threads": 1}, "cache": cache})


@pytest.mark.parametrize("plane", ["shm", "zmq", "staged"])
@pytest.mark.parametrize(
    ("role", "part"),
    [
        (Role.PREFILL, PARTS + "make_plane"),
        (Role.PREFILL, PARTS + "KVCacheManager"),
        (Role.DECODE, PARTS + "load_engine"),
        (Role.PREFILL, PARTS + "take_over"),
        (Role.PREFILL, WORKER + "KVSender"),
        (Role.DECODE, WORKER + "KVReceiver"),
        (Role.PREFILL, WORKER + "PrefillWorker"),
        (Role.DECODE, "twinpool.colocate.worker.DecodeWorker"),
    ],
)
def test_a_worker_that_cannot_be_built_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, part: str, plane: str
) -> None:
    config, spec = config_of(plane, tmp_path), read_model_spec(folder)
    counts = counts_for(folder, config, role, 1024)

    def build() -> object:
        return build_worker(
            role, WorkerName(f"{role}-0"), Incarnation(1), spec, config, host="127.0.0.1", counts=counts
        )

    fails_and_leaves_nothing(build, monkeypatch, part)


def test_a_follower_that_cannot_be_built_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, spec = config_of("shm", tmp_path), read_model_spec(folder)
    counts = counts_for(folder, config, Role.DECODE, 1024)

    def build() -> object:
        return build_rank(Role.DECODE, spec, config, host="127.0.0.1", counts=counts, ranks=ALONE)

    fails_and_leaves_nothing(build, monkeypatch, "twinpool.cluster.assembly.build_worker.load_engine")
