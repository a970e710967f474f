"""A Ray node goes, by death or with notice: what its workers ran goes on elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import Answer, complete, environment, serving, until

NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
places = {"twinpool_prefill": 1, "twinpool_decode": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": places, "include_dashboard": False})
print(json.dumps({"address": cluster.address}), flush=True)
sys.stdin.readline()
node = cluster.add_node(num_cpus=1, resources={"twinpool_decode": 1})
raylet = node.all_processes["raylet"][0].process.pid
print(json.dumps({"raylet": raylet, "node": node.node_id}), flush=True)
sys.stdin.readline()
cluster.add_node(num_cpus=1, resources={"twinpool_decode": 1})
sys.stdin.readline()
"""


@contextmanager
def nodes(runtime: Path, on_head: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A Ray on this machine: a head with so many places for decode, a node with one, and on demand another one."""
    env = environment(runtime) | {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [sys.executable, "-c", NODES, str(on_head)], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        family = [process.pid, *(c.pid for c in psutil.Process(process.pid).children(recursive=True))]
        for pid in family:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def more_nodes(process: subprocess.Popen[str]) -> None:
    """Go on to the script's next step."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, object] = json.loads(line)
            return found
    raise AssertionError("Ray's nodes did not start")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_dies_costs_no_answer_and_its_workers_come_back_elsewhere(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=51)
    oracle, rng = Oracle(folder), random.Random(4)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(20, 300))] for _ in range(24)]
    sections = {"cache": {"device_tokens": 8192}, "cluster": {"lease_s": 4, "start_timeout_s": 200}}
    with nodes(tmp_path) as ray:
        address = str(said(ray)["address"])
        more_nodes(ray)
        raylet = psutil.Process(int(str(said(ray)["raylet"])))
        flags = ("--prefill", "1", "--decode", "2", "--ray-address", address, "--set", "transfer.plane=zmq")
        with serving(folder, tmp_path / "run", *flags, sections=sections, ready_within=300, orderly=False) as cluster:
            there = {c.pid for c in raylet.children(recursive=True)}
            before = cluster.status()
            (victim,) = [name for name, w in before.items() if w["pid"] in there]

            async def under_load() -> list[Answer]:
                async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
                    tasks = [asyncio.create_task(complete(client, cluster.body(p, max_tokens=200))) for p in prompts]
                    while True:
                        rows = (await client.get("/cluster/status")).json()["workers"]
                        if any(w["running"] for w in rows if w["name"] == victim):
                            break
                        await asyncio.sleep(0.02)
                    for process in [raylet, *raylet.children(recursive=True)]:
                        process.kill()
                    return list(await asyncio.gather(*tasks))

            answers = asyncio.run(under_load())
            for prompt, answer in zip(prompts, answers, strict=True):
                assert compare(oracle, prompt, answer.tokens).equal
            assert any(a.twinpool["attempts"] > 1 for a in answers)
            more_nodes(ray)
            until(lambda: cluster.status()[victim]["state"] == "ready", f"{victim} to come back on another node", 250)
            assert cluster.status()[victim]["incarnation"] > before[victim]["incarnation"]
            cluster.settle()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_are_on_one_node_where_it_has_places_else_on_two_and_a_node_that_dies_is_the_worker_lost(
    tmp_path: Path,
) -> None:
    """Of two decode workers of two stages one is on the head, the other on both nodes: rank 1 dies with its node."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=53)
    oracle, rng = Oracle(folder), random.Random(6)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(20, 300))] for _ in range(16)]
    sections = {
        "cache": {"device_tokens": 8192},
        "cluster": {"lease_s": 6, "start_timeout_s": 200, "ranks_over_hosts": "true"},
        "decode": {"pp": 2},
    }
    with nodes(tmp_path, on_head=3) as ray:
        address = str(said(ray)["address"])
        more_nodes(ray)
        second = said(ray)
        raylet = psutil.Process(int(str(second["raylet"])))
        flags = ("--prefill", "1", "--decode", "2", "--ray-address", address, "--set", "transfer.plane=zmq")
        with serving(folder, tmp_path / "run", *flags, sections=sections, ready_within=400, orderly=False) as cluster:

            def spread() -> list[str]:
                rows = cluster.status().items()
                return [name for name, row in rows if len({row["node_id"], *(n for _, n in row["rank_nodes"])}) == 2]

            until(lambda: all(w["state"] == "ready" for w in cluster.status().values()), "all workers", 250)
            (victim,) = spread()
            assert [node for _, node in cluster.status()[victim]["rank_nodes"]] == [second["node"]]
            before = cluster.status()[victim]["incarnation"]
            (other,) = {"decode-0", "decode-1"} - {victim}

            async def under_load() -> list[Answer]:
                async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
                    tasks = [asyncio.create_task(complete(client, cluster.body(p, max_tokens=120))) for p in prompts]
                    while True:
                        rows = (await client.get("/cluster/status")).json()["workers"]
                        if any(w["running"] for w in rows if w["name"] == victim):
                            break
                        await asyncio.sleep(0.02)
                    for process in [raylet, *raylet.children(recursive=True)]:
                        process.kill()
                    return list(await asyncio.gather(*tasks))

            answers = asyncio.run(under_load())
            for prompt, answer in zip(prompts, answers, strict=True):
                assert compare(oracle, prompt, answer.tokens).equal
            assert any(a.twinpool["attempts"] > 1 for a in answers), "the victim ran none of them"
            assert cluster.status()[other]["incarnation"] == 1
            more_nodes(ray)
            until(lambda: cluster.status()[victim]["state"] == "ready", f"{victim} to come back", 250)
            assert cluster.status()[victim]["incarnation"] > before
            assert spread() == [victim]
            third = cluster.status()[victim]["rank_nodes"][0][1]
            done = cluster.twinpool("drain", third, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            assert cluster.status()[victim]["state"] == "left", "its rank 1 is on the node that was drained"
            cluster.settle()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_d1_ray_drain_node_moves_what_runs_there_and_costs_no_stream_anything(tmp_path: Path) -> None:
    """As a provider's preemption notice comes: to Ray, and from Ray to nobody. Its workers have left in time."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=52)
    oracle, rng = Oracle(folder), random.Random(5)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(20, 300))] for _ in range(12)]
    sections = {
        "cache": {"device_tokens": 16384}, "cluster": {"start_timeout_s": 200}, "faults": {"step_delay_s": 0.02},
    }  # fmt: skip
    with nodes(tmp_path) as ray:
        address = str(said(ray)["address"])
        more_nodes(ray)
        node = said(ray)
        raylet = psutil.Process(int(str(node["raylet"])))
        flags = ("--prefill", "1", "--decode", "2", "--ray-address", address, "--set", "transfer.plane=zmq")
        with serving(folder, tmp_path / "run", *flags, sections=sections, ready_within=300, orderly=False) as cluster:
            there = {c.pid for c in raylet.children(recursive=True)}
            (victim,) = [name for name, w in cluster.status().items() if w["pid"] in there]

            async def under_load() -> list[Answer]:
                async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
                    bodies = [cluster.body(p, max_tokens=400, stream=True) for p in prompts]
                    tasks = [asyncio.create_task(complete(client, body)) for body in bodies]
                    while True:
                        rows = (await client.get("/cluster/status")).json()["workers"]
                        if any(w["running"] > 3 for w in rows if w["name"] == victim):
                            break
                        await asyncio.sleep(0.02)
                    await asyncio.to_thread(drain_node, tmp_path, address, str(node["node"]))
                    return list(await asyncio.gather(*tasks))

            answers = asyncio.run(under_load())
            until(lambda: cluster.status()[victim]["state"] == "left", f"{victim} to leave", 100)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert compare(oracle, prompt, answer.tokens).equal
            assert cluster.metric("twinpool_migrations_total", outcome="migrated") > 0
            assert cluster.metric("twinpool_replays_total") == 0
            assert any(f"{victim} drains: Ray takes its node" in line for line in cluster.lines), cluster.lines
            assert not any("died" in line for line in cluster.lines), cluster.lines
            cluster.settle()


def drain_node(runtime: Path, address: str, node: str) -> None:
    """`ray drain-node`, with the words of a preemption."""
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address, "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "this machine is taken away"]
    command += ["--deadline-remaining-seconds", "120"]
    env = environment(runtime) | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
