"""`twinpool apply`: what it says, what it orders and in which order, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import AdminClient, CommandRefused
from twinpool.cli.operator.apply_command import ApplyCommand, ChangedModels, read_settings
from twinpool.cli.operator.rolling_restart import OTHERS_S, RollingRestart
from twinpool.cluster.serve.detached_state import ORDER_FILE, STATE_FILE, ModelsOrder, ModelsState
from twinpool.cluster.serve.models_config import ModelsChange
from twinpool.cluster.serve.preflight import ServeOptions
from twinpool.cluster.serve.security_check import with_absolute_paths
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict, load_config
from twinpool.contracts.errors import ConfigError

NEW = {"prefill": "p2", "decode": "d2"}
TIMEOUT_S = 30.0
CHANGED = [{"key": "decode.retract_limit", "before": "3", "after": "4", "roles": ["decode"]}]


class Cluster(RouterStub):
    """A router of two pools whose workers restart, start and leave at once when they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = {f"{role}-{n}": row(f"{role}-{n}", settings=f"{role[0]}1") for role in NEW for n in range(2)}
        self.changed = list(CHANGED)
        self.orders: list[str] = []
        self.refusals = 0
        self.looks = self.comes_after = 0
        """Looks at the status, and after how many decode-1 serves; 0: it stays as it is."""
        self.behind: list[tuple[int, str]] = []
        """Routers and controllers that have other settings, and why, at each look after the change."""
        self.starts_with: dict[str, str] = NEW
        self.routers: list[dict[str, Any]] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        what, _, query = path.removeprefix("/cluster/").partition("?")
        if what == "status":
            self.looks += 1
            if self.comes_after and self.looks >= self.comes_after:
                self.workers["decode-1"]["state"] = "ready"
            return 200, {"workers": [dict(worker) for worker in self.workers.values()], "routers": self.routers}
        if what == "apply":
            answer: dict[str, Any] = {"changed": list(self.changed), "digests": NEW}
            if query and "apply" in self.orders and self.behind:
                count, trouble = self.behind.pop(0)
                if count < 0:
                    return 503, {"error": {"message": trouble}}
                answer |= {"behind": count, "trouble": trouble}
            if not query:
                self.orders.append("apply")
                self.changed = []
            return 200, answer
        if self.refusals:
            self.refusals -= 1
            return 409, {"error": {"message": "nobody else serves"}}
        self.orders.append(path.removeprefix("/cluster/"))
        if what.startswith("restart/"):
            worker = self.workers[what.removeprefix("restart/")]
            rows = [
                {"name": worker["name"], "incarnation": worker["incarnation"], "outcome": "leaves and starts again"}
            ]
            worker["incarnation"] += 1
            worker["settings"] = self.starts_with[worker["role"]]
            return 200, {"workers": rows}
        return 200, {"workers": self.scale(dict(pair.split("=") for pair in query.split("&")))}

    def scale(self, sizes: dict[str, str]) -> list[dict[str, Any]]:
        rows = []
        for role, count in sizes.items():
            there = [w for w in self.workers.values() if w["role"] == role and w["state"] == "ready"]
            for number in range(len(there), int(count)):
                name = f"{role}-{number}"
                self.workers[name] = row(name, settings=self.starts_with[role])
                rows.append({"name": name, "incarnation": 0, "outcome": "starts"})
            for worker in there[int(count) :]:
                worker["state"] = "left"
                rows.append({"name": worker["name"], "incarnation": worker["incarnation"], "outcome": "leaves"})
        return rows


class Scene:
    def __init__(self, url: str, settings: dict[str, Any], *, force: bool = False) -> None:
        clock = ManualClock()
        self.said: list[str] = []
        client = AdminClient(url, clock.now, clock.advance)
        self.command = ApplyCommand(client, settings, self.said.append, timeout_s=TIMEOUT_S, force=force)

    def run(self) -> None:
        self.command.run(self.command.plan())


def test_pools_grow_then_old_workers_restart_one_by_one_then_pools_shrink() -> None:
    with router_stub(Cluster()) as cluster:
        settings = {"pools": {"prefill": 1, "decode": 3}, "decode": {"retract_limit": 4}}
        scene = Scene(cluster.url, settings)
        assert scene.command.plan().lines() == [
            "decode.retract_limit: 3 -> 4 (by decode workers as they start)",
            "prefill workers: 2 -> 1",
            "decode workers: 2 -> 3",
            "restarts one by one: prefill-0, prefill-1, decode-0, decode-1",
        ]
        assert cluster.orders == [], "a plan changes nothing"
        scene.run()
        assert cluster.orders == [
            "apply", "scale?decode=3", "restart/prefill-0", "restart/decode-0", "restart/prefill-1", "restart/decode-1",
            "scale?prefill=1",
        ]  # fmt: skip
        assert cluster.bodies == [settings] * len(cluster.bodies)
        assert scene.command.plan().nothing
        assert scene.said[0] == "the settings are changed"


def test_what_an_earlier_command_has_left_is_gone_on_with() -> None:
    with router_stub(Cluster()) as cluster:
        cluster.changed = []
        for name in ("prefill-0", "prefill-1", "decode-0"):
            cluster.workers[name]["settings"] = NEW[cluster.workers[name]["role"]]
        Scene(cluster.url, {}).run()
        assert cluster.orders == ["restart/decode-1"]


def test_a_role_with_one_worker_is_refused_before_anything_is_changed() -> None:
    with router_stub(Cluster()) as cluster:
        del cluster.workers["decode-1"]
        with pytest.raises(CommandRefused, match="decode-0 is the only decode worker"):
            Scene(cluster.url, {}).run()
        assert cluster.orders == []
        Scene(cluster.url, {"pools": {"decode": 2}}).run()
        assert cluster.orders[:2] == ["apply", "scale?decode=2"]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["starting", "dead", "draining"])
def test_a_worker_that_is_on_its_way_is_waited_for_a_minute(state: str) -> None:
    with router_stub(Cluster()) as cluster:
        cluster.workers["decode-1"]["state"] = state
        scene = Scene(cluster.url, {"decode": {"retract_limit": 4}})
        began = scene.command._operator.clock()
        with pytest.raises(CommandRefused, match="decode-0 is the only decode worker"):
            scene.run()
        drains = state == "draining"
        waited = scene.command._operator.clock() - began
        assert waited == pytest.approx(TIMEOUT_S if drains else OTHERS_S, abs=1.0)
        waits = "decode-1 drains and waits for its last frames" if drains else f"waits for decode-1, which is {state}"
        assert scene.said == [waits]
        assert cluster.orders == []
        cluster.comes_after, cluster.looks = 5, 0
        scene.run()
        assert cluster.orders[0] == "apply"
        assert "restart/decode-0" in cluster.orders


@pytest.mark.parametrize(
    ("state", "counts", "restarts", "where"),
    [
        ("ready", True, True, ""),
        ("unreachable", True, True, ""),
        ("starting", True, False, "starting"),
        ("dead", True, False, ""),
        ("draining", False, False, "leaving"),
        ("left", False, False, ""),
    ],
)
def test_a_workers_state_says_whether_it_is_one_of_its_pools_and_what_is_left_to_do_of_it(
    state: str, counts: bool, restarts: bool, where: str
) -> None:
    with router_stub(Cluster()) as cluster:
        cluster.workers["decode-1"]["state"] = state
        plan = Scene(cluster.url, {"pools": {"decode": 2}}).command.plan()
        assert plan.sizes == ({} if counts else {"decode": (1, 2)}), "one that comes back is not started twice"
        assert ("decode-1" in plan.old) is restarts
        for name in ("starting", "leaving"):
            assert getattr(plan, name) == ["decode-1"] * (name == where)


class SlowCluster:
    """A cluster in which decode-0 takes 25 s to come back, and from then on decode-1 starts for 20 s."""

    def __init__(self, *, drains: bool) -> None:
        self._clock, self._drains = ManualClock(), drains
        self.clock, self.sleep = self._clock.now, self._clock.advance

    def call(self, method: str, path: str) -> dict[str, Any]:
        return {"workers": [{"name": "decode-0", "incarnation": 1, "outcome": "leaves and starts again"}]}

    def rows(self) -> list[dict[str, Any]]:
        back = self.clock() >= 25.0
        return [row("decode-0", "ready" if back else "draining", incarnation=1 + back)]

    def look(self) -> Any:
        back, all_serve = self.clock() >= 25.0, self.clock() >= 45.0
        return SimpleNamespace(
            old={} if back or self._drains else {"decode-0": "decode"},
            leaving=["decode-0"] if self._drains and not back else [],
            starting=["decode-1"] if back and not all_serve else [],
        )


@pytest.mark.parametrize("drains", [False, True])
def test_one_that_starts_has_its_own_time_however_long_the_one_before_took(drains: bool) -> None:
    cluster: Any = SlowCluster(drains=drains)
    command = RollingRestart(cluster, lambda line: None, timeout_s=30.0, force=False)
    try:
        command.run(cluster.look, "what it should")
    except CommandRefused as error:
        pytest.fail(f"given up after {cluster.clock():.0f} s: {error}")
    assert cluster.clock() == pytest.approx(45.0, abs=1.0)


def test_a_router_whose_table_is_older_makes_no_worker_look_as_if_it_had_not_restarted() -> None:
    """Each look may go to another router: one of them shows decode-0 as it was once more, after it has come back."""
    with router_stub(Cluster()) as cluster:
        shown: list[dict[str, Any]] = []

        def lagging(method: str, path: str) -> tuple[int, dict[str, Any]]:
            before = dict(cluster.workers["decode-0"])
            status, body = Cluster.answer(cluster, method, path)
            if path.endswith("restart/decode-0"):
                shown[:] = [before, dict(cluster.workers["decode-0"])]
            elif path.endswith("status") and shown:
                late = shown.pop()
                body = body | {"workers": [late if w["name"] == "decode-0" else w for w in body["workers"]]}
            return status, body

        cluster.answer = lagging  # type: ignore[method-assign]
        try:
            Scene(cluster.url, {}).run()
        except CommandRefused as error:
            pytest.fail(f"a worker of before its restart was taken for one of after it: {error}")
        assert not shown, "both looks were taken"
        assert [order for order in cluster.orders if "decode" in order] == ["restart/decode-0", "restart/decode-1"]


def test_routers_with_settings_of_their_own_are_named() -> None:
    with router_stub(Cluster()) as cluster:
        one = {"name": "router-0", "node": "host-a", "address": "h:1", "build": "b", "settings": "s2", "kept": True}
        cluster.routers = [one, one | {"name": "edge", "node": "host-b", "settings": "s1", "kept": False}]
        scene = Scene(cluster.url, {"router": {"write_timeout_s": 9}})
        scene.run()
        (said,) = [line for line in scene.said if "serve doesn't keep" in line]
        assert "edge at h:1 on host-b (build b, settings s1)" in said
        assert "--take-over" in said


def test_force_restarts_the_only_worker_too() -> None:
    with router_stub(Cluster()) as cluster:
        del cluster.workers["decode-1"]
        Scene(cluster.url, {}, force=True).run()
        assert "restart/decode-0?force=true" in cluster.orders


def test_a_restart_that_is_refused_is_ordered_again_for_a_while() -> None:
    with router_stub(Cluster()) as cluster:
        cluster.refusals = 5
        Scene(cluster.url, {}).run()
        assert len(cluster.orders) == 5
    with router_stub(Cluster()) as cluster:
        cluster.refusals = 10**6
        with pytest.raises(CommandRefused, match="nobody else serves"):
            Scene(cluster.url, {}).run()


def test_a_worker_that_does_not_come_back_stops_it() -> None:
    with router_stub(Cluster()) as cluster:
        worker = cluster.workers["prefill-0"]
        scene = Scene(cluster.url, {})
        plan = scene.command.plan()
        worker["state"] = "dead"  # It dies as it is told; its next incarnation never serves.
        worker["settings"] = ""
        cluster.workers["prefill-1"]["settings"] = "p2"

        def restarted(method: str, path: str) -> tuple[int, dict[str, Any]]:
            status, body = Cluster.answer(cluster, method, path)
            if path.endswith("restart/decode-0"):
                cluster.workers["decode-0"]["state"] = "starting"
            return status, body

        cluster.answer = restarted  # type: ignore[method-assign]
        with pytest.raises(CommandRefused, match="decode-0 is starting and should serve"):
            scene.command.run(plan)
        assert "restart/decode-1" not in cluster.orders, "the next one doesn't drain"
        assert "decode-1" in scene.command.left()


def test_a_worker_that_comes_back_with_other_settings_is_not_restarted_for_ever() -> None:
    with router_stub(Cluster()) as cluster:
        cluster.starts_with = {"prefill": "p3", "decode": "d3"}
        with pytest.raises(CommandRefused, match="came back without the file's settings"):
            Scene(cluster.url, {}).run()
        assert cluster.orders == ["apply", "restart/prefill-0"]


def test_pools_that_the_cluster_has_not_are_refused() -> None:
    with router_stub(Cluster()) as cluster, pytest.raises(CommandRefused, match=r"pools\.colocated"):
        Scene(cluster.url, {"pools": {"colocated": 2}}).command.plan()


# ---------------------------------------------------------------- the command


def twinpool(*arguments: str) -> int:
    return cli.run(command_line.parser().parse_args(["apply", *arguments]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("decode: {retract_limit: 4}\n")
    return path


def test_a_dry_run_says_it_and_does_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with router_stub(Cluster()) as cluster:
        assert twinpool(str(file), "--dry-run", "--url", cluster.url) == 0
        assert "decode.retract_limit: 3 -> 4" in capsys.readouterr().out
        assert cluster.orders == []


def test_a_file_that_changes_nothing_says_so(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with router_stub(Cluster()) as cluster:
        assert twinpool(str(file), "--url", cluster.url) == 0
        assert "done after" in capsys.readouterr().out
        assert twinpool(str(file), "--url", cluster.url) == 0
        assert capsys.readouterr().out.startswith("nothing to do")


def test_ctrl_c_says_what_is_left(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with router_stub(Cluster()) as cluster:

        def interrupt(self: RollingRestart, name: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(RollingRestart, "_restart", interrupt)
        assert twinpool(str(file), "--url", cluster.url) == 130
        assert "stopped; left to do: restarts one by one: prefill-0" in capsys.readouterr().out


def test_what_is_refused_is_exit_code_1_with_the_reason(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with router_stub(RouterStub()) as stub:
        stub.refusal = (409, "decode.tp can't be changed")
        assert twinpool(str(file), "--url", stub.url) == 1
        assert "decode.tp can't be changed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["- a\n", "{", "a: 2020-01-01\n"])
def test_a_file_that_is_no_configuration_is_wrong_usage(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_settings(path)
    assert twinpool(str(path), "--url", "http://127.0.0.1:9") == 2


def test_paths_are_absolute_as_serve_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    Path("c.yaml").write_text(
        "security: {keys_file: keys.json, admin_keys_file: ~/operators.json, tls_cert: ''}\n"
        "cache: {host_bytes: 0, storage: {backend: file, path: pages}}\n"
    )
    found = read_settings(Path("c.yaml"))
    assert found["security"] == {
        "keys_file": str(tmp_path / "keys.json"), "admin_keys_file": "/home/somebody/operators.json", "tls_cert": ""
    }  # fmt: skip
    assert found["cache"] == {"host_bytes": 0, "storage": {"backend": "file", "path": str(tmp_path / "pages")}}
    assert config_from_dict(found) == with_absolute_paths(load_config(Path("c.yaml"))), "serve's file changes nothing"


def test_the_folder_of_another_storage_and_what_is_no_path_are_left_to_the_supervisor(tmp_path: Path) -> None:
    path, sections = tmp_path / "c.yaml", {"security": {"keys_file": 5}, "cache": {"storage": {}}, "router": None}
    path.write_text(json.dumps(sections))
    assert read_settings(path) == sections
    sections = {"security": [], "cache": {"storage": {"backend": "memory", "path": "a name"}}}
    path.write_text(json.dumps(sections))
    assert read_settings(path) == sections


def test_services_are_waited_for_while_they_are_replaced() -> None:
    with router_stub(Cluster()) as cluster:
        away = (-1, "the controller can't be reached")
        cluster.behind = [(3, ""), away, away, (1, ""), (0, "")]
        cluster.changed[0] = {"key": "router.stall_s", "before": "3", "after": "4", "roles": [], "by": "routers"}
        scene = Scene(cluster.url, {"router": {"stall_s": 4}})
        assert "router.stall_s: 3 -> 4 (by routers, which are replaced one by one)" in scene.command.plan().lines()
        scene.run()
        assert not cluster.behind
        assert cluster.orders[0] == "apply"


@pytest.mark.parametrize("trouble", ["router-0 ended before it listened", ""])
def test_who_is_not_replaced_is_named(trouble: str) -> None:
    with router_stub(Cluster()) as cluster:
        cluster.behind = [(2, trouble)] * 1000
        with pytest.raises(CommandRefused, match=trouble or "2 routers and controllers have settings of before"):
            Scene(cluster.url, {"router": {"stall_s": 4}}).run()
        assert cluster.orders == ["apply"], "no worker restarts"


class ChangingModels:
    """A run of the models a and b, whose supervisor carries an order out `after_s` seconds of the command's waiting."""

    def __init__(self, place: Path, url: str, change: ModelsChange, *, after_s: float, trouble: str = "") -> None:
        self._place, self._after_s, self._trouble = place, after_s, trouble
        configs = {name: config_from_dict({}) for name in ("a", "b")}
        folders = {name: place / name for name in configs}
        self.state = ModelsState(place, place, ServeOptions(), 1, configs, folders)
        self.state.save()
        self.found: list[ModelsOrder] = []
        self._clock = ManualClock()
        client = AdminClient(url, self._clock.now, self._sleep)
        stay = ApplyCommand(client, change.settings["a"], lambda line: None, timeout_s=TIMEOUT_S)
        self.command = ChangedModels({"a": stay}, change, place, client, TIMEOUT_S)

    def _sleep(self, seconds: float) -> None:
        self._clock.advance(seconds)
        order = ModelsOrder.read(self._place)
        if self._trouble == "ended":
            (self._place / STATE_FILE).unlink()
        elif order is not None and self._clock.now() >= self._after_s:
            self.found.append(order)
            self.state.carried_out, self.state.trouble = order.token, self._trouble
            self.state.save()
            (self._place / ORDER_FILE).unlink()


NEXT = ModelsChange({"a": {"decode": {"retract_limit": 4}}}, {"c": config_from_dict({"pools": {"decode": 3}})}, ("b",))


def test_models_come_and_go_before_those_that_stay_are_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with router_stub(Cluster()) as cluster:
        run = ChangingModels(tmp_path, cluster.url, NEXT, after_s=7.0)
        plan = run.command.plan()
        assert plan.lines()[:2] == ["b: is removed once its answers have ended", "c: is added"]
        assert plan.lines()[2].startswith("a: decode.retract_limit")
        assert ModelsOrder.read(tmp_path) is None, "nothing is done yet"
        assert run.command.run(plan) >= 7.0
        (order,) = run.found
        assert (list(order.added), order.added["c"]["pools"]["decode"], order.removed) == (["c"], 3, ("b",))
        assert cluster.orders[0] == "apply"
        assert capsys.readouterr().out.splitlines()[:2] == ["b: is being removed", "c: is being added"]


@pytest.mark.parametrize(
    ("after_s", "trouble", "words"),
    [
        (1.0, "model c is not added: no checkpoint", "model c is not added: no checkpoint"),
        (1e9, "", "within 60 s"),
        (1e9, "ended", "has been ended meanwhile"),
    ],
)
def test_where_models_can_not_be_changed_those_that_stay_are_not_either(
    tmp_path: Path, after_s: float, trouble: str, words: str
) -> None:
    with router_stub(Cluster()) as cluster:
        run = ChangingModels(tmp_path, cluster.url, NEXT, after_s=after_s, trouble=trouble)
        with pytest.raises(CommandRefused, match=words):
            run.command.run(run.command.plan())
        assert cluster.orders == []
        assert run.command.left().startswith("models are added") is (after_s > 1.0)


def test_nothing_is_ordered_where_a_model_that_stays_would_be_refused_or_another_order_is_under_way(
    tmp_path: Path,
) -> None:
    with router_stub(Cluster()) as cluster:
        run = ChangingModels(tmp_path, cluster.url, NEXT, after_s=1.0)
        earlier = ModelsOrder.of({}, ("b",))
        earlier.write(tmp_path)
        with pytest.raises(CommandRefused, match="an earlier command's models"):
            run.command.run(run.command.plan())
        assert ModelsOrder.read(tmp_path) == earlier
        (tmp_path / ORDER_FILE).unlink()
        cluster.workers["decode-1"]["state"] = "left"
        with pytest.raises(CommandRefused, match="decode-0 is the only"):
            run.command.run(run.command.plan())
        assert (run.found, cluster.orders, ModelsOrder.read(tmp_path)) == ([], [], None)
