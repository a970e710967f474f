"""Several models of a detached run under load, whose processes of every kind are killed, whose settings and build
change: every answer of each is its own model's, exact, and none is lost. And how long one that sleeps takes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.changing_cluster import (
    FILE,
    UPGRADE_S,
    WAIT_S,
    Detached,
    Load,
    another_build,
    command,
    detached,
    kill,
    some_prompts,
)
from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.served_cluster import until

ROUNDS = int(os.environ.get("TWINPOOL_ROUNDS", "3"))
MODELS = {"first": {"prefill": 2, "decode": 2}, "second": {"colocated": 2}}
NIGHT = "night"
LAUNCH_S = 900.0
SUPERVISOR = "twinpool.cluster.serve.detached_cluster"
ROUTER, CONTROLLER = "twinpool.router.main", "twinpool.cluster.controller.controller_process"
COMMON: dict[str, Any] = {
    "engine": {"threads": 1},
    "cache": {"device_tokens": 8192},
    "cluster": {"lease_s": 8, "restart_limit": 50, "host_memory_share": 0.05},
    "faults": {"step_delay_s": 0.004},
}


class Models:
    """A detached run of several models, and what happens to it."""

    def __init__(self, cluster: Detached) -> None:
        self.cluster = cluster

    def rows(self, model: str) -> list[dict[str, Any]]:
        done = self.cluster.twinpool("status", "--json", "--model-name", model)
        return list(json.loads(done.stdout)["workers"]) if done.returncode == 0 else []

    def ready(self, within_s: float = 2 * WAIT_S) -> None:
        """Wait until all pools are whole and nothing else is on its way."""

        def whole(model: str) -> bool:
            states = [row["state"] for row in self.rows(model) if row["state"] != "left"]
            return states == ["ready"] * sum(MODELS[model].values())

        until(lambda: all(whole(model) for model in MODELS), "all models to serve", within_s)

    def folder(self, model: str) -> str:
        state = json.loads((self.cluster.folder / "cluster.state").read_text())
        return str(state["models"][model])

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those whose command line has all these words, one of them a word or the end of one."""
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if all(any(one == word or one.endswith(word) for one in line) for word in words):
                    found.append(process)
        return found

    def kill_and_await_the_next(self, *words: str, other: str = "no such word") -> None:
        """Kill the one process of these words, and wait for another of them. `other`: a word that it doesn't have."""

        def mine() -> list[psutil.Process]:
            return [one for one in self.processes(*words) if not any(w.endswith(other) for w in one.cmdline())]

        (victim,) = mine()
        kill(victim)
        until(lambda: [one.pid for one in mine()] not in ([], [victim.pid]), f"the next {words}", WAIT_S)

    # ------------------------------------------------------------ what happens to it

    def kill_worker(self) -> None:
        (victim,) = (row for row in self.rows("first") if row["name"] == "decode-1")
        kill(psutil.Process(victim["pid"]))
        until(lambda: self.rows("first")[-1]["incarnation"] > victim["incarnation"], "the next worker", WAIT_S)

    def kill_controller(self) -> None:
        self.kill_and_await_the_next(CONTROLLER, f"{self.folder('second')}/controller.sqlite")

    def kill_keeper_of_a_model(self) -> None:
        """Its supervisor dies with it; the cluster serves on, and the next ones take it over."""
        self.kill_and_await_the_next("keeper.py", self.folder("first"))

    def kill_supervisor_of_a_model(self) -> None:
        self.kill_and_await_the_next(SUPERVISOR, self.folder("second"), other="keeper.py")

    def kill_supervisor(self) -> None:
        self.kill_and_await_the_next(SUPERVISOR, str(self.cluster.folder), other="keeper.py")

    def kill_router(self) -> None:
        self.kill_and_await_the_next(ROUTER, "router-1")

    def apply(self) -> None:
        """Workers of one model restart; routers are replaced for what they read of the other one."""
        file = self.cluster.runtime / FILE
        tree = json.loads(file.read_text())
        before = {model: {row["name"]: row["incarnation"] for row in self.rows(model)} for model in MODELS}
        routers = {one.pid for one in self.processes(ROUTER)}
        number = before["first"]["decode-0"]
        tree["models"]["first"]["decode"] = {"max_batch_tokens": 32 + number % 8}
        tree["models"]["second"]["router"] = {"breaker_failures": 6 + number % 8}
        file.write_text(json.dumps(tree))
        said = self.cluster.twinpool("apply", FILE, "--dry-run", timeout=WAIT_S)
        assert "first: restarts one by one: decode-0, decode-1" in said.stdout, said.stdout + said.stderr
        assert "second: router.breaker_failures" in said.stdout
        command(self.cluster, "up", FILE, within_s=UPGRADE_S)
        self.ready()
        after = {model: {row["name"]: row["incarnation"] for row in self.rows(model)} for model in MODELS}
        assert after["second"] == before["second"]
        assert {name for name, n in after["first"].items() if n != before["first"][name]} == {"decode-0", "decode-1"}
        state = json.loads((self.cluster.folder / "cluster.state").read_text())
        assert routers.isdisjoint({state["services"][f"router-{number}"][0] for number in range(2)})

    def upgrade(self) -> None:
        (before,) = {row["build"] for model in MODELS for row in self.rows(model)}
        python = another_build(self.cluster.runtime / "another")
        command(self.cluster, "upgrade", "--python", str(python), within_s=3 * UPGRADE_S)
        (after,) = {row["build"] for model in MODELS for row in self.rows(model) if row["state"] != "left"}
        assert after != before
        state = json.loads((self.cluster.folder / "cluster.state").read_text())
        assert {state["services"][f"router-{number}"][2] for number in range(2)} == {after}


KILLS = (
    Models.kill_worker,
    Models.kill_controller,
    Models.kill_keeper_of_a_model,
    Models.kill_supervisor_of_a_model,
    Models.kill_supervisor,
    Models.kill_router,
)


@contextlib.contextmanager
def served(tmp_path: Path) -> Iterator[tuple[Models, dict[str, Oracle]]]:
    folders = {name: make_checkpoint(tmp_path / name, "qwen3", seed=seed) for seed, name in enumerate(MODELS)}
    models = {name: {"launch": {"model": str(folders[name])}, "pools": pools} for name, pools in MODELS.items()}
    sections = {**COMMON, "models": models}
    first, runtime = folders["first"], tmp_path / "run"
    with detached(first, runtime, sections=sections, by_file={"routers": 2}, ready_within=LAUNCH_S) as cluster:
        yield Models(cluster), {name: Oracle(folder) for name, folder in folders.items()}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_kills_settings_and_an_upgrade_lose_no_answer_of_any_model(tmp_path: Path) -> None:
    with served(tmp_path) as (models, oracles):
        for number in range(ROUNDS):
            last = (Models.upgrade,) if number + 1 == ROUNDS else ()
            loads = {name: Load(models.cluster.url, name, some_prompts(number), 3, seed=number) for name in MODELS}
            with contextlib.ExitStack() as running:
                for load in loads.values():
                    running.enter_context(load.running())
                for change in (*KILLS, Models.apply, *last):
                    for load in loads.values():
                        load.more()
                    began = time.monotonic()
                    change(models)
                    models.ready()
                    print(f"{change.__name__}: {time.monotonic() - began:.0f} s", flush=True)
                for load in loads.values():
                    load.more()
            for name, load in loads.items():
                load.verify(oracles[name])
                checked = models.cluster.twinpool("check", "--model-name", name)
                assert checked.returncode == 0, checked.stdout
                print(f"{name}: {len(load.answers)} answers, {load.resumed} resumed, all exact", flush=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_model_that_sleeps_answers_within_the_time_that_plan_says(tmp_path: Path) -> None:
    """The time is that of the machine as it is: it is measured right before."""
    folder = make_checkpoint(tmp_path / NIGHT, "qwen3", seed=3)
    night = {
        "launch": {"model": str(folder)}, "pools": {"colocated": 1},
        "cluster": {"sleep_after_s": 5.0, "sleep_level": 2},
    }  # fmt: skip
    others = {name: {"launch": {"model": str(folder)}, "pools": {"colocated": 1}} for name in MODELS}
    sections = {**COMMON, "models": {**others, NIGHT: night}}
    with detached(
        folder, tmp_path / "run", sections=sections, by_file={"routers": 1}, ready_within=LAUNCH_S
    ) as cluster:
        flags = [part for key in ("cache.device_tokens=8192", "engine.threads=1") for part in ("--set", key)]
        said = cluster.twinpool("plan", "--measure", "--model", str(folder), *flags, timeout=LAUNCH_S)
        assert said.returncode == 0, said.stdout + said.stderr
        (at_most,) = re.findall(r"level 2.*?router\.wake_timeout_s=(\d+)", said.stdout + said.stderr, re.DOTALL)
        until(
            lambda: (
                cluster.metric("twinpool_wakes_total", model=NIGHT) == 0
                and "asleep" in cluster.twinpool("status", "--model-name", NIGHT).stdout
            ),
            "the model to fall asleep",
            WAIT_S,
        )
        began = time.monotonic()
        answer = cluster.complete([5, 6, 7], model=NIGHT, max_tokens=4)
        took = time.monotonic() - began
        assert len(answer.tokens) == 4
        print(f"the first answer took {took:.1f} s, and plan says at most {at_most} s")
        assert took <= float(at_most)
