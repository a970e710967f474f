"""The KV index as a process: it fills a table from the controller's workers, is restarted, and ends with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.serve.services import service_context
from tests.router.fake_worker import FakeCluster
from tests.router.grpc_fakes import grpc_cluster
from tests.support.served_cluster import ROOT
from twinpool.cache.tiers.kv_event_publisher import KVEventLog, KVEventPublisher
from twinpool.cluster.processes.process_ids import same_process
from twinpool.cluster.serve.cluster_services import KV_INDEX, index_arguments, index_wanted, with_kv_events
from twinpool.cluster.serve.service import Service
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.credentials.certificate_files import read_curve_pair
from twinpool.contracts.messages.kv_events import BlockStored, EventMedium
from twinpool.router.kv_indexer.holder_table import KVIndexReader
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber
from twinpool.router.state.prefix_hashes import prefix_hashes

LOOPBACK = "tcp://127.0.0.1:0"
PROMPT = tuple(range(640))


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it never is"
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_process_follows_the_controllers_workers_and_is_restarted(tmp_path: Path) -> None:
    config, log = EventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK), KVEventLog()
    told, hashes = KVIndexReader(tmp_path / "kv-index"), prefix_hashes(PROMPT)
    publisher, cluster = KVEventPublisher(config, log, time.time), FakeCluster(1, 1)
    worker = cluster["prefill-0"]
    worker.node, worker.kv_events, worker.kv_replay = os.uname().nodename, publisher.endpoint, publisher.replay_endpoint
    log.emit(BlockStored(EventMedium.DEVICE, None, tuple(block_hashes(PROMPT, 16)), PROMPT, 16))
    said: list[str] = []
    again: list[tuple[int, int]] = []
    async with grpc_cluster(cluster) as controller:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps(config_from_dict({"router": {"kv_index_bytes": 1 << 20}}).to_dict()))
        arguments = index_arguments(controller, tmp_path / "kv-index", settings)
        stack = ExitStack()
        context = service_context(
            tmp_path, SystemClock(), said.append, stack, owns=lambda *process: again.append(process)
        )
        run = Service(context, "kv-index", KV_INDEX, arguments, environment)

        def known() -> bool:
            publisher.round()
            found = told.find(hashes, time.monotonic())
            slot = found.slots.workers.get((worker.name, worker.incarnation)) if found is not None else None
            return found is not None and slot is not None and bool(found.live[slot]) and found.depths.device[slot] > 300

        def restarted() -> bool:
            assert not run.tend()
            return len(again) > 1

        try:
            run.start()
            await until(known)
            first = told.memory
            os.kill(again[0][0], 9)
            await until(restarted)
            await until(lambda: known() and told.memory is not first)
        finally:
            run.stop(5.0)
            publisher.close()
    assert len(said) == 1
    assert "signal 9" in said[0]
    assert not any(same_process(*mark) for mark in again)
    run.stop(5.0)
    stack.close()
    assert not (tmp_path / "kv-index").exists(), "a link to nothing: the memory went with the process"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; from pathlib import Path\n"
        "from twinpool.contracts.config.load_config import config_from_dict\n"
        "from tests.cluster.serve.services import service_context\n"
        "from twinpool.cluster.serve.cluster_services import KV_INDEX, index_arguments\n"
        "from twinpool.cluster.serve.service import Service\n"
        "from twinpool.contracts.clock import SystemClock; from contextlib import ExitStack\n"
        "p = Path(sys.argv[1]); (p / 's').write_text(json.dumps(config_from_dict({}).to_dict()))\n"
        "arguments = index_arguments('127.0.0.1:1', p / 'kv-index', p / 's')\n"
        "tell = lambda *process: print(*process, flush=True)\n"
        "context = service_context(p, SystemClock(), print, ExitStack(), owns=tell)\n"
        "Service(context, 'kv-index', KV_INDEX, arguments, os.environ).start()\n"
        "sys.stdin.read(); os._exit(0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, started = map(int, parent.stdout.readline().split())
    await until((tmp_path / "kv-index").exists)
    assert same_process(pid, started)
    parent.stdin.close()
    assert parent.wait(60) == 0
    await until(lambda: not same_process(pid, started))
    parent.stdout.close()


def test_an_index_runs_where_something_goes_by_it_and_workers_publish_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config_from_dict({})
    assert not index_wanted(plain), "nobody publishes"
    config = with_kv_events(plain, tmp_path)
    assert index_wanted(config)
    assert (config.cache.events.endpoint, config.cache.events.replay_endpoint) == (LOOPBACK, LOOPBACK)
    for settings in ({"router": {"kv_index": "none"}}, {"router": {"policy": "round_robin"}}):
        config = config_from_dict(settings)
        assert with_kv_events(config, tmp_path) == config
        assert not index_wanted(config_from_dict({**settings, "cache": {"events": {"endpoint": LOOPBACK}}}))
    with monkeypatch.context() as arm:
        arm.setattr(platform, "machine", lambda: "aarch64")
        assert with_kv_events(plain, tmp_path) == plain, "its processes see stores in another order"
    own = config_from_dict({"cache": {"events": {"endpoint": "tcp://127.0.0.1:5557"}}})
    assert with_kv_events(own, tmp_path) == own, "what the operator says stays"
    assert index_wanted(own)


def test_nobody_reads_the_prompts_of_another_user_from_the_events_of_the_index(tmp_path: Path) -> None:
    config = with_kv_events(config_from_dict({}), tmp_path)
    key = Path(config.security.curve_key)
    assert key.parent.stat().st_mode & 0o777 == 0o700
    log = KVEventLog()
    publisher = KVEventPublisher(config.cache.events, log, time.time, curve=read_curve_pair(key))
    clock = SystemClock()
    stranger = KVEventSubscriber(publisher.endpoint, clock, publisher.replay_endpoint)
    reader = KVEventSubscriber(publisher.endpoint, clock, publisher.replay_endpoint, key_file=key)
    deadline = time.monotonic() + 60
    while not reader.complete:
        assert time.monotonic() < deadline
        publisher.round()
        for one in (reader, stranger):
            one.poll(0.01)
    assert not stranger.complete
    for closed in (reader, stranger, publisher):
        closed.close()
    keyed = config_from_dict({"security": {"curve_key": str(key)}})
    assert with_kv_events(keyed, tmp_path).security == keyed.security, "the operator's key stays"
