"""Workers of a detached cluster, on a real Ray: who takes them over, however often, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served_cluster import ROOT
from twinpool.cluster.processes import reaper
from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.cluster.processes.run_folder import new_folder

PRELUDE = """
import dataclasses, os, signal, sys, threading, time
from pathlib import Path
from twinpool.cluster.ray_nodes.ray_cluster import start_kept_ray
from twinpool.cluster.processes.free_port import free_port
address, _ = start_kept_ray(Path(sys.argv[1]), free_port("127.0.0.1", 0), False)
import psutil
started = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
words = [word for line in started if any(sys.argv[1] in word for word in line) for word in line]
assert any(word.endswith("raylet") for word in words) and not any(word.endswith("monitor.py") for word in words)
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from twinpool.cluster.ray_nodes import worker_actor, worker_actors
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName

class Waits(worker_actors.WorkerActor):
    def run(self, leader_at=""):
        self._runs = True
        threading.Event().wait()
    def taken(self):
        plan = self._next.take(30.0)
        return os.getpid(), plan.incarnation, str(plan.role)

worker_actors.WorkerActor = Waits
def joined(namespace):
    ray.shutdown()
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    return worker_actors.RayLauncher(detached=True)

def plan(name):
    return WorkerPlan(WorkerName(name), Role.DECODE, Incarnation(1), Path("m"), Config(), {}, "", "", Path(sys.argv[1]))

"""

TAKEN_OVER = """
for namespace, name in (("mine", "decode-0"), ("another", "decode-7")):
    launcher = joined(namespace)
    launcher.start(plan(name))
    (running,) = launcher._running.values()
    ray.get(running.where, timeout=60)
for _ in range(worker_actors.CALLS_AT_ONCE + 2):
    launcher = joined("mine")
    launcher.adopt()
    assert launcher.running() == [("decode-0", 1)], launcher.running()
    assert launcher.ended(0.05) == []
launcher.close()
launcher = joined("another")
launcher.adopt()
assert launcher.running() == [("decode-7", 1)], launcher.running()

# One that is stopped answers nobody: the next launcher doesn't have it, and it doesn't live on.
launcher.start(plan("decode-8"))
stopped = next(one for one in launcher._running.values() if one.started.key[0] == "decode-8")
pid = ray.get(stopped.where, timeout=60).pid
os.kill(pid, signal.SIGSTOP)
worker_actors.GET_TIMEOUT_S = 5.0  # decode-7 has to answer by then.
launcher = joined("another")
launcher.adopt()
assert launcher.running() == [("decode-7", 1)], launcher.running()
deadline = time.monotonic() + 60
while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
    assert time.monotonic() < deadline, "it lives still"
    time.sleep(0.05)
print("a stopped one is ended")

# Nor does one that a launcher has made and not told to run, nor a leader without its other ranks.
launcher._actor(plan("decode-9"), None, {})
two = dataclasses.replace(Config(), decode=dataclasses.replace(Config().decode, tp=2))
lone = launcher._actor(dataclasses.replace(plan("decode-10"), config=two), None, {})
lone.run.remote()
ray.get(lone.where.remote(), timeout=60)
worker_actors.GET_TIMEOUT_S, worker_actors.TOLD_S = 10.0, 0.2
launcher = joined("another")
launcher.adopt()
assert launcher.running() == [("decode-7", 1)], launcher.running()
deadline = time.monotonic() + 60
while set(ray.util.list_named_actors()) - {"decode-7.1"}:
    assert time.monotonic() < deadline, ray.util.list_named_actors()
    time.sleep(0.05)
print("those that nobody tells are ended")

# The places of several ranks are given back by whoever ends their worker.
before = ray.cluster_resources()["twinpool_decode"] - 1  # decode-7's; those that have just ended may still be counted.
launcher.start(dataclasses.replace(plan("decode-11"), config=two))
for one in launcher._running.values():
    ray.get([one.where, *(follower.where for follower in one.followers.values())], timeout=60)
launcher = joined("another")
launcher.adopt()
assert sorted(launcher.running()) == [("decode-11", 1), ("decode-7", 1)], launcher.running()
launcher.kill(WorkerName("decode-11"), Incarnation(1), 0, "")
deadline, gone = time.monotonic() + 60, []
while not gone or ray.available_resources().get("twinpool_decode") != before:
    gone += launcher.ended(0.05)
    assert time.monotonic() < deadline, ray.available_resources()
# Those that share their experts start once all are asked for, and are taken over with their places, which the last
# gives back. Of a group that was asked for in part nothing is there for the next launcher.
shared = dataclasses.replace(Config(), decode=dataclasses.replace(Config().decode, dp=2))
group = [dataclasses.replace(plan(f"decode-{number}"), config=shared) for number in (12, 13, 14)]
for one in (group[2], *group[:2]):
    launcher.start(one)
assert len(launcher.running()) == 4
mine = [one for one in launcher._running.values() if one.started.together]
assert len({ray.get(one.where, timeout=60).node_id for one in mine}) == 1
launcher = joined("another")
launcher.adopt()
assert sorted(launcher.running()) == [("decode-12", 1), ("decode-13", 1), ("decode-7", 1)], launcher.running()
for name, left in (("decode-12", before - 2), ("decode-13", before)):
    launcher.kill(WorkerName(name), Incarnation(1), 0, "")
    deadline, gone = time.monotonic() + 60, []
    while not gone or ray.available_resources().get("twinpool_decode") != left:
        gone += launcher.ended(0.05)
        assert time.monotonic() < deadline, (name, ray.available_resources())
print("places are given back")
launcher.kill(WorkerName("decode-7"), Incarnation(1), 0, "")
while not (ended := launcher.ended(1.0)):
    pass
print("ended", ended[0].name)

clock, restarts = ManualClock(100.0), []
launcher = worker_actors.RayLauncher(
    clock=clock, detached=True, store_restarted_at=lambda: restarts[-1] if restarts else None
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

ROLES = """
launcher = joined("another")
launcher.start(plan("decode-7"))
other = dataclasses.replace(plan("decode-7"), role=Role.PREFILL, incarnation=Incarnation(2))
(running,) = launcher._running.values()
def free(role):
    return ray.available_resources().get(role, 0)
def soon(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, ray.available_resources()
        launcher.ended(0.05)
pid = ray.get(running.where, timeout=60).pid
soon(lambda: running.at is not None)
places = free("twinpool_prefill")
launcher.placed()
launcher.start(other, successor_of=Incarnation(1))
assert launcher.running() == [("decode-7", 2)], launcher.running()
(placed,) = launcher.placed()
assert (placed.name, placed.incarnation, placed.node.node_id) == ("decode-7", 2, running.at.node_id)
assert ray.get(running.handle.taken.remote(), timeout=60) == (pid, 2, "prefill")
soon(lambda: free("twinpool_prefill") == places - 1)
launcher = joined("another")
launcher.adopt()
assert launcher.running() == [("decode-7", 2)], launcher.running()
(running,) = launcher._running.values()
assert running.place is not None
soon(lambda: running.at is not None)
back = dataclasses.replace(other, role=Role.DECODE, incarnation=Incarnation(3))
launcher.start(back, successor_of=Incarnation(2))
assert ray.get(running.handle.taken.remote(), timeout=60) == (pid, 3, "decode")
soon(lambda: free("twinpool_prefill") == places)  # It was started in a place of decode, and has that still.

# What can't go on is started anew: with other settings of the engine, and without a free place.
engine = dataclasses.replace(other.config.engine, dtype="bfloat16")
changed = dataclasses.replace(other, incarnation=Incarnation(4), config=dataclasses.replace(Config(), engine=engine))
launcher.start(changed, successor_of=Incarnation(3))
assert sorted(launcher.running()) == [("decode-7", 3), ("decode-7", 4)], launcher.running()
soon(lambda: launcher.running() == [("decode-7", 4)])
(running,) = launcher._running.values()
soon(lambda: running.at is not None)
assert running.at.pid != pid
all_others = placement_group([{"twinpool_decode": free("twinpool_decode")}])
assert all_others.wait(60)
worker_actor.PLACE_WAIT_S = 0.2
last = dataclasses.replace(changed, role=Role.DECODE, incarnation=Incarnation(5))
launcher.start(last, successor_of=Incarnation(4))
soon(lambda: launcher.running() == [("decode-7", 5)])
remove_placement_group(all_others)
worker_actor.PLACE_WAIT_S = 30.0
(running,) = launcher._running.values()
soon(lambda: running.at is not None)
launcher.start(dataclasses.replace(changed, incarnation=Incarnation(6)), successor_of=Incarnation(5))
launcher._running.clear()
launcher.adopt()
assert launcher.running() == [("decode-7", 6)], launcher.running()
os.kill(running.at.pid, 9)
soon(lambda: launcher.running() == [])  # The next launcher doesn't know it any more: its places are free all the same.
launcher.adopt()
soon(lambda: free("twinpool_prefill") == places)
print("free")
ray.shutdown()
"""


def said_by(script: str, tmp_path: Path) -> tuple[int, str]:
    """Run a script beside a Ray of its own; returns its exit code and what it said."""
    folder = new_folder()
    with (tmp_path / "out").open("w+") as out:
        try:
            done = subprocess.run(
                [sys.executable, "-c", PRELUDE + script, str(folder)],
                env={**os.environ, "PYTHONPATH": str(ROOT), reaper.MARK: folder.name},
                stdout=out,
                stderr=out,
                timeout=400,
                check=False,
            )
        finally:
            ReapedRun(folder.name, str(folder)).end()
        out.seek(0)
        return done.returncode, out.read()


@pytest.mark.slow
def test_each_launcher_takes_over_its_own_clusters_workers_however_many_came_before(tmp_path: Path) -> None:
    """More launchers than an actor serves calls at once: the calls of those before have returned. A start that Ray's
    control store has forgotten is told as ended."""
    code, said = said_by(TAKEN_OVER, tmp_path)
    assert (code, said.splitlines()[-2:]) == (0, ["ended decode-7", "forgotten"]), said[-2000:]


@pytest.mark.slow
def test_a_process_that_goes_on_in_another_role_has_a_place_of_it_under_its_launcher_and_the_next_ones(
    tmp_path: Path,
) -> None:
    """One that can't go on is started anew: with other settings of the engine, or without a free place. The places of
    one that was killed while no launcher knew it are free again."""
    code, said = said_by(ROLES, tmp_path)
    assert (code, said.splitlines()[-1:]) == (0, ["free"]), said[-2000:]
