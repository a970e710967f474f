"""Workers of a detached cluster, on a real Ray: who takes them over, however often, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.processes import reaper
from cluster.processes.reaper import ReapedRun
from cluster.processes.run_folder import new_folder
from tests.serving import ROOT

SCRIPT = """
import sys, threading
from pathlib import Path
from cluster.ray_nodes.ray_cluster import start_kept_ray
from cluster.serve.preflight import free_port
address, _ = start_kept_ray(Path(sys.argv[1]), free_port("127.0.0.1", 0), False)
import ray
from cluster.ray_nodes import worker_actors
from cluster.worker_process.worker_plan import WorkerPlan
from contracts.clock import ManualClock
from contracts.config.cluster_config import Config
from contracts.ids import Incarnation, Role, WorkerName

class Waits(worker_actors.WorkerActor):
    def run(self):
        threading.Event().wait()

worker_actors.WorkerActor = Waits
def joined(namespace):
    ray.shutdown()
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    return worker_actors.RayLauncher(lambda plan: None, detached=True)

def plan(name):
    return WorkerPlan(WorkerName(name), Role.DECODE, Incarnation(1), Path("m"), Config(), {}, "", "", Path(sys.argv[1]))

for namespace, name in (("mine", "decode-0"), ("another", "decode-7")):
    launcher = joined(namespace)
    launcher.start(plan(name))
    (running,) = launcher._running.values()
    ray.get(running.where, timeout=60)
for _ in range(3 * worker_actors.CALLS_AT_ONCE):
    launcher = joined("mine")
    launcher.adopt()
    assert launcher.running() == [("decode-0", 1)], launcher.running()
    assert launcher.ended(0.05) == []
launcher.close()
launcher = joined("another")
launcher.adopt()
assert launcher.running() == [("decode-7", 1)], launcher.running()
launcher.kill(WorkerName("decode-7"), Incarnation(1), 0, "")
while not (ended := launcher.ended(1.0)):
    pass
print("ended", ended[0].name)

clock, restarts = ManualClock(100.0), []
launcher = worker_actors.RayLauncher(
    lambda plan: None, clock=clock, detached=True, store_restarted_at=lambda: restarts[-1] if restarts else None
)
launcher.start(plan("decode-1"))
(running,) = launcher._running.values()
while not running.at:
    launcher.ended(1.0)
launcher.start(plan("decode-2"), only="no such node")  # It is never placed.
assert launcher.ended(0.0) == []
clock.advance(5.0)
restarts.append(clock.now())
clock.advance(worker_actors.PLACED_AGAIN_S - 0.1)
launcher.start(plan("decode-3"), only="no such node")
assert launcher.ended(0.0) == []
clock.advance(0.1)
assert [one.name for one in launcher.ended(0.0)] == ["decode-2"], "decode-1 runs, decode-3 was asked for later"
assert launcher.ended(0.0) == []
assert sorted(launcher.running()) == [("decode-1", 1), ("decode-3", 1)]
assert "decode-2.1" not in ray.util.list_named_actors()
print("forgotten")
ray.shutdown()
"""


@pytest.mark.slow
def test_each_launcher_takes_over_its_own_clusters_workers_however_many_came_before(tmp_path: Path) -> None:
    """More launchers than an actor serves calls at once: the calls of those before have returned. A start that Ray's
    control store has forgotten is told as ended."""
    folder = new_folder()
    with (tmp_path / "out").open("w+") as out:
        try:
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT, str(folder)],
                env={**os.environ, "PYTHONPATH": str(ROOT), reaper.MARK: folder.name},
                stdout=out,
                stderr=out,
                timeout=120,
                check=False,
            )
        finally:
            ReapedRun(folder.name, str(folder)).end()
        out.seek(0)
        said = out.read()
    assert (done.returncode, said.splitlines()[-2:]) == (0, ["ended decode-7", "forgotten"]), said[-2000:]
