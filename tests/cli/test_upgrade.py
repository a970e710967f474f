"""`twinpool upgrade`: what it says, what it orders and in which order, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import AdminClient, CommandRefused
from twinpool.cli.command_parser import NO_CLUSTER, USAGE
from twinpool.cli.operator import upgrade_command
from twinpool.cli.operator.cluster_rows import apart
from twinpool.cli.operator.rolling_restart import next_in_turn
from twinpool.cli.operator.status_command import status_view
from twinpool.cli.operator.upgrade_command import UpgradeCommand, UpgradeOfModels
from twinpool.cluster.processes.keeper import FAILED, NEXT, TAKEN_OVER, NextSupervisor
from twinpool.cluster.processes.run_folder import RunFile
from twinpool.cluster.serve.supervisor_upgrade import (
    CheckedBuild,
    UpgradeRefused,
    check_build,
    interpreter_of,
    replace_supervisor,
)
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ConfigError

OLD, NEW = "0.1.0+old", "0.1.0+new"
BUILD = CheckedBuild(Path("/new/bin/python"), NEW)


class Cluster(RouterStub):
    """A router of pools whose workers restart at once, with the build that the supervisor has."""

    def __init__(self, prefill: int = 2, decode: int = 2) -> None:
        super().__init__()
        sizes = {"prefill": prefill, "decode": decode}
        names = [f"{role}-{n}" for role, count in sizes.items() for n in range(count)]
        self.workers = {name: row(name, build=OLD) for name in names}
        self.starts_with, self.router_build = NEW, NEW
        self.orders: list[str] = []
        self.routers: list[dict[str, Any]] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        what, _, query = path.removeprefix("/cluster/").partition("?")
        if what == "status":
            rows = [dict(one) for one in self.workers.values()]
            return 200, {"workers": rows, "router_build": self.router_build, "routers": self.routers}
        worker = self.workers[what.removeprefix("restart/")]
        self.orders.append(f"{worker['name']}{'!' * bool(query)}")
        rows = [{"name": worker["name"], "incarnation": worker["incarnation"], "outcome": "leaves and starts again"}]
        worker["incarnation"] += 1
        worker["build"] = self.starts_with
        return 200, {"workers": rows}


class Scene:
    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, force: bool = False) -> None:
        self.said: list[str] = []
        self.replaced = 0
        self.folder = folder
        self.services(OLD)
        clock = ManualClock()
        client = AdminClient(url, clock.now, clock.advance)
        run = RunFile(url, 1, 1, str(folder), "demo", folder=str(folder))
        self.command = UpgradeCommand(client, run, BUILD, self.said.append, timeout_s=30.0, force=force)
        monkeypatch.setattr(upgrade_command, "replace_supervisor", self._replace)

    def _replace(self, *of: Any) -> None:
        self.replaced += 1
        self.services(NEW)

    def services(self, build: str) -> None:
        (self.folder / "cluster.state").write_text(json.dumps({"services": {"controller": [1, 2, build]}}))

    def run(self) -> None:
        self.command.run(self.command.plan())


def test_the_supervisor_comes_first_then_the_pools_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with router_stub(Cluster(3, 2)) as cluster:
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        assert scene.command.plan().lines() == [
            f"supervisor, controller and routers: {OLD} -> {NEW}",
            "restarts one by one: prefill-0, prefill-1, prefill-2, decode-0, decode-1",
        ]
        scene.run()
        assert scene.replaced == 1
        assert cluster.orders == ["prefill-0", "decode-0", "prefill-1", "decode-1", "prefill-2"]
        assert scene.command.plan().nothing
        assert scene.said[0] == f"the supervisor, the controller and the routers are of build {NEW}"


class SeveralModels:
    """Two models, a and b, and the routers of both; `order` is what was done to which, in turn."""

    def __init__(self, urls: dict[str, str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        runs = {name: RunFile(urls["a"], 1, 1, "", "demo", folder=str(place / name)) for name in ("a", "b", "all")}
        for name in runs:
            (place / name).mkdir()
            self._state(place / name, OLD)
        commands = {name: Scene(url, place / name, monkeypatch).command for name, url in urls.items()}
        monkeypatch.setattr(upgrade_command, "replace_supervisor", self._replace)
        self.command = UpgradeOfModels(commands, {name: runs[name] for name in "ab"}, runs["all"], BUILD)

    def _replace(self, build: CheckedBuild, run: RunFile, wait: Any) -> None:
        self.order.append(Path(run.folder).name)
        self._state(Path(run.folder), build.build)

    @staticmethod
    def _state(folder: Path, build: str) -> None:
        service = "router-0" if folder.name == "all" else "controller"
        (folder / "cluster.state").write_text(json.dumps({"services": {service: [1, 2, build]}}))


def test_of_several_models_all_supervisors_come_first_then_the_routers_then_each_ones_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster(2, 2)) as a, router_stub(Cluster(2, 2)) as b:
        models = SeveralModels({"a": a.url, "b": b.url}, tmp_path, monkeypatch)
        a.orders = b.orders = models.order
        plan = models.command.plan()
        supervisor = f"supervisor, controller and routers: {OLD} -> {NEW}"
        assert [line for line in plan.lines() if "supervisor" in line] == [
            f"a: {supervisor}", f"b: {supervisor}", f"routers: {supervisor}"
        ]  # fmt: skip
        models.command.run(plan)
        assert models.order == ["a", "b", "all", *["prefill-0", "decode-0", "prefill-1", "decode-1"] * 2]
        assert models.command.plan().nothing


def test_of_several_models_none_is_upgraded_where_one_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster(2, 2)) as a, router_stub(Cluster(2, 1)) as b:
        models = SeveralModels({"a": a.url, "b": b.url}, tmp_path, monkeypatch)
        with pytest.raises(CommandRefused, match="decode-0 is the only decode worker"):
            models.command.run(models.command.plan())
        assert (models.order, a.orders) == ([], [])


def test_what_an_earlier_command_has_left_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with router_stub(Cluster()) as cluster:
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        scene.services(NEW)
        cluster.workers["prefill-0"]["build"] = cluster.workers["decode-1"]["build"] = NEW
        scene.run()
        assert (scene.replaced, cluster.orders) == (0, ["prefill-1", "decode-0"])


@pytest.mark.parametrize("build", [OLD, NEW])
@pytest.mark.parametrize(
    ("state", "where"),
    [
        ("ready", "old"), ("unreachable", "old"), ("starting", "starting"), ("draining", "leaving"), ("dead", ""),
        ("left", ""),
    ],
)  # fmt: skip
def test_a_workers_state_says_what_is_left_to_do_of_it(
    state: str, where: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster(1, 1)) as cluster:
        cluster.workers["prefill-0"]["build"] = NEW
        cluster.workers["decode-0"] |= {"build": build, "state": state}
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        scene.services(NEW)
        plan = scene.command.plan()
        if build == NEW and state != "starting":
            where = ""  # Of one that starts the build isn't known yet.
        found = {name: list(getattr(plan, name)) for name in ("old", "starting", "leaving")}
        assert found == {name: ["decode-0"] * (name == where) for name in found}
        assert plan.nothing is (where in ("", "starting"))
        assert plan.serving.get("decode", 0) == (state in ("ready", "unreachable"))


def test_routers_that_nobody_keeps_are_named_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with router_stub(Cluster()) as cluster:
        by_hand = {"name": "edge", "node": "host-b", "address": "10.0.0.2:80", "settings": "s", "kept": False}
        cluster.routers = [by_hand | {"build": OLD}, by_hand | {"name": "kept", "build": OLD, "kept": True}]
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        before = scene.command.plan().lines()[-1]
        scene.run()
        for said in (before, scene.said[-1]):
            assert said.startswith("not replaced, since serve doesn't keep them: edge at 10.0.0.2:80 on host-b")
            assert "kept at" not in said
        cluster.routers = [by_hand | {"build": NEW}]
        assert scene.command.plan().lines() == []


FINGERPRINT = {"protocol": 4, "layout": "l", "weights": "w", "numerics": "invariant:cpu/code-1"}


class DrainingCluster(Cluster):
    """A cluster whose decode-1 drains as an upgrade that timed out has left it: a long answer of the build before runs
    there, and decode-0, which is of the new one, can't go on with it."""

    def __init__(self, comes_back_after: int, **differs: Any) -> None:
        super().__init__()
        for name in ("prefill-0", "prefill-1", "decode-0"):
            self.workers[name] |= {"build": NEW, "fingerprint": FINGERPRINT | differs}
        self.workers["decode-1"] |= {"state": "draining", "running": 1, "fingerprint": FINGERPRINT}
        self.looks, self._comes_back_after = 0, comes_back_after

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        self.looks += 1
        left = self._comes_back_after - self.looks
        if left in (0, 1, 2):
            state = ("ready", "starting", "dead")[left]
            self.workers["decode-1"] |= {"state": state, "running": 0, "incarnation": 1 if left == 2 else 2}
            if not left:
                self.workers["decode-1"] |= {"build": NEW, "fingerprint": self.workers["decode-0"]["fingerprint"]}
        return super().answer(method, path)


def test_a_worker_that_still_drains_is_not_done_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(DrainingCluster(60, numerics="invariant:cpu/code-2")) as cluster:
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        scene.services(NEW)
        plan = scene.command.plan()
        assert not plan.nothing
        assert plan.lines() == ["waits for what drains already: decode-1"]
        scene.run()
        assert cluster.orders == []
        assert cluster.workers["decode-1"]["build"] == NEW, "it is done when that one serves again"
        assert scene.command.plan().nothing
        apart, *waits = scene.said
        assert apart.startswith("the two builds can't go on with each other's requests (numerics)")
        assert waits[0] == (
            "decode-1 drains and waits for 1 running: none of the decode workers that serve can go on with them "
            "(they differ in numerics), so they end where they are"
        )


def test_an_answer_longer_than_the_bound_ends_the_command_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(DrainingCluster(10**6, protocol=5)) as cluster:
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        scene.services(NEW)
        with pytest.raises(CommandRefused) as refused:
            scene.run()
        said = str(refused.value)
        for part in (
            "not done after 30 s, and goes on: decode-1 drains and waits for 1 running",
            "(they differ in protocol)",
            "the cluster serves on",
            "The same command goes on with it",
            "--timeout",
        ):
            assert part in said
        assert "(protocol 4 -> 5)" in scene.said[0]
        assert cluster.orders == []


def test_no_other_worker_restarts_before_the_one_that_drains_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(DrainingCluster(40)) as cluster:
        cluster.workers["decode-2"] = row("decode-2", build=OLD)
        scene = Scene(cluster.url, tmp_path, monkeypatch)
        scene.services(NEW)
        scene.run()
        assert cluster.orders == ["decode-2"]
        assert cluster.workers["decode-1"]["state"] == "ready"
        assert not any("can't go on" in line for line in scene.said), "workers of one class take its answers over"


@pytest.mark.parametrize(
    ("ours", "theirs", "parts"),
    [
        ({}, {}, ()),
        ({}, {"numerics": "invariant:b"}, ("numerics",)),
        ({"numerics": "fast:a"}, {"numerics": "fast:b"}, ()),
        ({"numerics": "fast:a"}, {"numerics": "invariant:a"}, ("numerics",)),
        ({"layout": "a", "protocol": 3}, {}, ("protocol", "layout")),
    ],
)
def test_rows_are_apart_where_workers_refuse_each_other(
    ours: dict[str, Any], theirs: dict[str, Any], parts: tuple[str, ...]
) -> None:
    one: dict[str, Any] = FINGERPRINT | ours
    other: dict[str, Any] = FINGERPRINT | theirs
    assert apart({"fingerprint": one}, {"fingerprint": other}) == parts
    assert apart({"fingerprint": other}, {"fingerprint": one | {"more": "of a newer build"}}) == parts
    assert apart({"fingerprint": None}, {"fingerprint": other}) == ()


def test_a_role_with_one_worker_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster(prefill=2, decode=1)) as cluster:
        with pytest.raises(CommandRefused, match="decode-0 is the only decode worker"):
            Scene(cluster.url, tmp_path, monkeypatch).run()
        assert cluster.orders == []
        forced = Scene(cluster.url, tmp_path, monkeypatch, force=True)
        forced.run()
        assert (forced.replaced, cluster.orders) == (1, ["prefill-0!", "decode-0!", "prefill-1!"])


def test_a_worker_that_comes_back_as_it_was_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with router_stub(Cluster()) as cluster:
        cluster.starts_with = OLD
        with pytest.raises(CommandRefused, match=r"prefill-0 came back without build 0\.1\.0\+new"):
            Scene(cluster.url, tmp_path, monkeypatch).run()
        assert cluster.orders == ["prefill-0"]


def test_a_router_that_stays_what_it_was_ends_it_before_a_worker_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster()) as cluster:
        cluster.router_build = OLD
        with pytest.raises(CommandRefused, match=r"the router at .* is of build"):
            Scene(cluster.url, tmp_path, monkeypatch).run()
        assert cluster.orders == []


@pytest.mark.parametrize(
    ("old", "pools", "first"),
    [
        ({"p0": "prefill", "d0": "decode"}, {"prefill": 2, "decode": 4}, "p0"),
        ({"p0": "prefill", "d0": "decode", "d1": "decode"}, {"prefill": 2, "decode": 2}, "d0"),
        ({"c0": "colocated"}, {}, "c0"),
    ],
)
def test_the_pool_of_which_most_is_left_is_next(old: dict[str, str], pools: dict[str, int], first: str) -> None:
    assert next_in_turn(old, pools) == first


def test_status_says_who_runs_which_build_while_there_are_two() -> None:
    from rich.console import Console

    def shown(*builds: str) -> str:
        console = Console(width=160)
        with console.capture() as capture:
            console.print(status_view({"workers": [row(f"decode-{n}", build=b) for n, b in enumerate(builds)]}))
        return capture.get()

    assert f"build {OLD}: decode-0, decode-2" in shown(OLD, NEW, OLD)
    assert f"build {NEW}: decode-1" in shown(OLD, NEW, OLD)
    assert "build" not in shown(NEW, NEW)


# ---------------------------------------------------------------- the supervisor


def run_of(folder: Path) -> RunFile:
    return RunFile("http://127.0.0.1:9", 1, 1, str(folder), "demo", folder=str(folder))


def test_the_keeper_is_asked_and_waited_for(tmp_path: Path) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            asked = NextSupervisor.take(tmp_path)
            assert asked is not None
            assert asked.command[0] == asked.command[-1] == "/new/bin/python"
            assert str(tmp_path) in asked.command
            assert asked.environment["PYTHONPATH"] is None
            assert asked.cwd == str(tmp_path), "not a source tree, from which Python would import"
            (tmp_path / TAKEN_OVER).write_text("1")

    (tmp_path / TAKEN_OVER).write_text("of the supervisor before")
    replace_supervisor(BUILD, run_of(tmp_path), wait)
    assert len(waits) == 3
    assert not (tmp_path / NEXT).exists()


def test_a_supervisor_that_did_not_take_over_is_shown_with_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "serve.out"
    output.write_text("of before\n")

    def wait(seconds: float) -> None:
        with output.open("a") as file:
            file.write("error: no such thing\n")
        (tmp_path / FAILED).write_text("exit code 1")

    with pytest.raises(UpgradeRefused, match="exit code 1") as refused:
        replace_supervisor(BUILD, run_of(tmp_path), wait)
    assert "error: no such thing" in str(refused.value)
    assert "of before" not in str(refused.value)


def test_a_keeper_that_does_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(UpgradeRefused, match="keeper does not replace"):
        replace_supervisor(BUILD, run_of(tmp_path), lambda seconds: None)


# ---------------------------------------------------------------- the interpreter


def script(folder: Path, text: str) -> Path:
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_environment_stands_for_its_interpreter(tmp_path: Path) -> None:
    python = script(tmp_path / "venv", "true")
    assert interpreter_of(tmp_path / "venv") == interpreter_of(python) == python
    for wrong in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="neither an interpreter nor a virtual environment"):
            interpreter_of(wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "echo No module named cluster >&2; exit 1",
            "no Twinpool that can check this cluster: No module named cluster",
        ),
        ("echo nonsense", "can't check this cluster"),
        ("true", "can't check this cluster"),
        ("""echo '{"build": "b", "refusal": "another Ray"}'""", "another Ray"),
    ],
)
def test_what_can_not_take_over_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UpgradeRefused, match=why):
        check_build(script(tmp_path, text), run_of(tmp_path))


def test_the_check_runs_without_what_would_lead_to_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    text = """echo "{\\"build\\": \\"$PYTHONPATH in $PWD of $4\\", \\"refusal\\": \\"\\"}\""""
    python = script(tmp_path, text)
    assert check_build(python, run_of(tmp_path)) == CheckedBuild(python, f" in / of {tmp_path}")


def test_a_cluster_of_a_terminal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UpgradeRefused, match="serve --detach"):
        check_build(script(tmp_path, "true"), RunFile("http://127.0.0.1:9", 1, 1, "logs", "demo"))


def test_a_clusters_own_certificates_are_those_that_its_router_is_checked_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFile("https://127.0.0.1:9", 1, 1, "logs", "demo", ca=str(tmp_path / "own.pem"), folder="there")
    for given, variable, named in (("", "", "own"), ("", "of-all.pem", "of-all"), ("given.pem", "of-all.pem", "given")):
        monkeypatch.setenv("TWINPOOL_CA", variable)
        with pytest.raises(ConfigError, match=rf"can't read the certificates .*{named}\.pem"):
            AdminClient.of_run(run, given)


def test_without_a_cluster_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TWINPOOL_URL", "http://127.0.0.1:9")
    script(tmp_path / "venv", "true")
    assert cli.run(command_line.parser().parse_args(["upgrade", "--python", str(tmp_path / "venv")])) == NO_CLUSTER
    assert "no cluster whose router is at http://127.0.0.1:9 is running" in capsys.readouterr().err
    assert cli.run(command_line.parser().parse_args(["upgrade", "--python", str(tmp_path)])) == USAGE
