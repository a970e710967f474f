"""Routers of another build that were replaced: watched until they have ended, by each supervisor in turn."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.processes.process_ids import same_process, start_time
from cluster.processes.run_folder import RunFolder
from cluster.serve.cluster_services import ClusterServices
from cluster.serve.detached_state import DetachedState, ServiceProcess
from cluster.serve.preflight import ServePlan
from contracts.clock import ManualClock
from tests.cluster.serve.test_detached_state import plan, state
from tests.serving import until

STALL_S = 15.0


@pytest.fixture(scope="module")
def prepared() -> ServePlan:
    return plan(f"router.stall_s={STALL_S}")


@pytest.fixture
def old() -> Iterator[ServiceProcess]:
    """A router that answers nobody."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield ServiceProcess(process.pid, start_time(process.pid) or 0, "another")
        process.kill()


def lives(process: ServiceProcess) -> bool:
    return same_process(process.pid, process.started)


def supervisor(tmp_path: Path, prepared: ServePlan, clock: ManualClock, said: list[str]) -> ClusterServices:
    """The next one: what it knows is what the last one has kept."""
    kept = DetachedState.load(tmp_path)
    folder = RunFolder.__new__(RunFolder)
    folder.temporary, folder.logs = tmp_path, tmp_path
    return ClusterServices(
        prepared, folder, clock, said.append, lambda name: "", address="127.0.0.1", secret="", admin={}, ledger={},
        state=kept,
    )  # fmt: skip


def test_one_that_hangs_is_killed_by_whoever_supervises_then(
    tmp_path: Path, prepared: ServePlan, old: ServiceProcess
) -> None:
    state(tmp_path, prepared).leaves("router-0", old)
    clock, said = ManualClock(), list[str]()
    services = supervisor(tmp_path, prepared, clock, said)
    with ExitStack() as stack:
        services.probe(stack)
        clock.advance(STALL_S - 1)
        services._tend_leaving()
        assert lives(old)
        clock.advance(1.0)
        services._tend_leaving()
        until(lambda: not lives(old), "its end")
        services._tend_leaving()
        assert said == ["router-0.another, which is replaced, hung: no answer for 15 s (router.stall_s)"]
        assert not services._leaving


def test_the_end_of_the_cluster_is_theirs(tmp_path: Path, prepared: ServePlan, old: ServiceProcess) -> None:
    state(tmp_path, prepared).leaves("router-0", old)
    with ExitStack() as stack:
        supervisor(tmp_path, prepared, ManualClock(), []).probe(stack)
        assert lives(old)
    until(lambda: not lives(old), "its end")


def test_what_has_ended_is_forgotten(tmp_path: Path, prepared: ServePlan, old: ServiceProcess) -> None:
    kept = state(tmp_path, prepared)
    kept.leaves("router-0", old)
    kept.leaves("router-1", old._replace(started=old.started + 1))
    assert kept.leaving == {"router-0.another": old}
    kept.save()
    assert set(DetachedState.load(tmp_path).services) == {"controller", "router-0.another"}
