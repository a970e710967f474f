"""Several models under one supervisor, with stand-ins for their processes: started, kept, ended."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from tests.support.served_cluster import until
from twinpool.cluster.assembly.node_shares import CardFacts
from twinpool.cluster.serve import model_cluster, model_clusters, serve_models
from twinpool.cluster.serve.detached_state import ORDER_FILE, STATE_FILE, ModelsOrder, ModelsState
from twinpool.cluster.serve.models_config import ModelsPlan, plan_models
from twinpool.cluster.serve.preflight import ServeOptions
from twinpool.cluster.serve.router_services import SharedRouters
from twinpool.cluster.serve.serve_models import ServeModels
from twinpool.cluster.serve.shutdown_signal import ASKED, FAILED, ShutdownSignal
from twinpool.contracts.build_id import build_id
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.router_report import RoutedModel

MODEL = """
import json, os, sys, time
from pathlib import Path
def given(name):
    return sys.argv[sys.argv.index(name) + 1]
config = Path(given("--config")).read_text()
with (Path(given("--logs")) / "starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
if "breaker_failures: 77" in config:
    sys.exit("error: it can't be served")
fresh = Path(given("--report") + ".new")
fresh.write_text(json.dumps({"model": given("--logs"), "controllers": "h:1"}))
fresh.replace(given("--report"))
os.write(int(given("--ready-fd")), b"ready")
time.sleep(600)
"""
ROUTER = """
import os, socket, sys
def given(name):
    return sys.argv[sys.argv.index(name) + 1]
bound = socket.socket(socket.AF_UNIX)
bound.bind(given("--live-socket"))
bound.listen()
os.write(int(given("--ready-fd")), b"ready")
while True:
    asked = bound.accept()[0]
    asked.recv(4096)
    asked.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    asked.close()
"""


class Stopping(ShutdownSignal):
    """A request to end that this process outlives."""

    def install(self) -> None: ...

    def ask(self) -> None:
        self._asked.set()

    def promise(self, code: int) -> None: ...


class Folder:
    """A run's folders, and what it was told."""

    def __init__(self, place: Path) -> None:
        self.temporary, self.logs = place / "t", place / "l"
        self.temporary.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        self.published: list[tuple[str, str]] = []

    def owns(self, pid: int, started: int) -> None: ...

    def owns_children(self) -> None: ...

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        self.published.append((url, model))


class Run:
    """One run of two models, in a thread."""

    def __init__(self, place: Path, *, detached: bool = False, **models: Any) -> None:
        file = place / "models.yaml"
        file.write_text(yaml.safe_dump({"launch": {"port": 0}, "models": models}))
        plan = plan_models(ServeOptions.of_file(file))
        assert plan is not None
        self.folder, self.out, self.stopping = Folder(place), io.StringIO(), Stopping(0.0)
        self.state = self._state(plan) if detached else None
        self.serve = ServeModels(plan, self.folder, self.out, self.stopping, state=self.state)
        self.code: list[int] = []
        self.thread = threading.Thread(target=lambda: self.code.append(self.serve.run()))

    def _state(self, plan: ModelsPlan) -> ModelsState:
        """Of a detached run, as an earlier supervisor has left it where there was one."""
        if (self.folder.temporary / STATE_FILE).exists():
            return ModelsState.load(self.folder.temporary)
        folders = {name: self.folder.temporary / name for name in plan.configs}
        configs = dict(plan.configs)
        return ModelsState(
            self.folder.temporary, self.folder.logs, plan.options, plan.port, configs=configs, folders=folders
        )

    def confirmed(self, model: str) -> Any:
        """What the model's cluster was told of the routers."""
        file = self.folder.temporary / f"{model}.confirmed"
        return json.loads(file.read_text()) if file.exists() else None

    def starts(self, model: str) -> list[int]:
        file = self.folder.logs / model / "starts"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def order(self, added: dict[str, dict[str, Any]], *removed: str) -> ModelsOrder:
        """Give the order of an operator's command."""
        order = ModelsOrder.of({name: config_from_dict(tree) for name, tree in added.items()}, removed)
        order.write(self.folder.temporary)
        return order

    def await_end_of(self, order: ModelsOrder) -> ModelsState:
        """The state once the order is carried out. Routers that others replace end meanwhile, as they do once their
        answers have ended."""

        def carried_out() -> bool:
            state = ModelsState.load(self.folder.temporary)
            for process in state.leaving.values():
                psutil.Process(process.pid).kill()
            return state.carried_out == order.token

        until(carried_out, "the order to be carried out", 60)
        assert not (self.folder.temporary / ORDER_FILE).exists()
        return ModelsState.load(self.folder.temporary)

    def routed(self) -> list[str]:
        """The models that routers are started with."""
        file = self.folder.temporary / "models.json"
        return [Path(one.model).name for one in msgspec.json.decode(file.read_bytes(), type=list[RoutedModel])]

    def first_card(self, model: str) -> int:
        command = psutil.Process(self.starts(model)[-1]).cmdline()
        return int(command[command.index("--first-card") + 1])

    def end(self) -> None:
        self.stopping.ask()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setattr(model_clusters, "MODEL", (sys.executable, "-S", "-c", MODEL))
    monkeypatch.setattr(serve_models, "ROUTER", (sys.executable, "-S", "-c", ROUTER))
    runs: list[Run] = []

    def start(*, detached: bool = False, **models: Any) -> Run:
        runs.append(run := Run(Path(folder), detached=detached, **models))
        run.thread.start()
        return run

    with TemporaryDirectory() as folder:  # The path of a socket has 107 bytes at most, and `tmp_path` may have most.
        yield start
        for run in runs:
            run.end()


@pytest.mark.slow
def test_models_are_started_once_each_and_started_again_when_they_die_and_all_end_together(
    begin: Callable[..., Run],
) -> None:
    run = begin(a={}, b={})
    until(lambda: bool(run.folder.published), "both to be served", 60)
    assert run.folder.published[0][1] == "a, b"
    assert run.routed() == ["a", "b"]
    first = run.starts("a")
    psutil.Process(first[0]).kill()
    until(lambda: len(run.starts("a")) == 2, "the model to be started again", 60)
    assert len(run.starts("b")) == 1
    pids = [*run.starts("a")[1:], *run.starts("b")]
    run.end()
    assert run.code == [ASKED]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_the_next_supervisor_of_a_detached_run_takes_models_and_routers_over(begin: Callable[..., Run]) -> None:
    first = begin(detached=True, a={}, b={})
    until(lambda: bool(first.folder.published), "both to be served", 60)
    second = begin(detached=True, a={}, b={})
    until(lambda: bool(second.folder.published), "the next one to take over", 60)
    assert (first.folder.temporary / "taken-over").exists()
    assert second.state is not None
    assert first.state is not None
    assert second.state.services == first.state.services
    assert [len(second.starts(model)) for model in ("a", "b")] == [1, 1]


@pytest.mark.slow
def test_routers_are_replaced_once_a_model_says_that_they_read_other_settings(begin: Callable[..., Run]) -> None:
    run = begin(detached=True, a={}, b={})
    until(lambda: run.confirmed("b") == ["", 0, ""], "the routers to have what b said first", 60)
    assert run.state is not None
    before, told = run.state.services["router"], SharedRouters(run.folder.temporary / "b.routed")
    routed = told.told()
    assert routed is not None
    told.tell(msgspec.structs.replace(routed, digest="1234", build="another"))
    told.tell(msgspec.structs.replace(routed, digest="5678", build=build_id()))
    assert told.behind("5678") == (1, ""), "nobody has said yet that they have it"
    until(lambda: told.behind("5678") == (0, ""), "the router to be replaced", 60)
    assert run.state.services["router"] != before
    assert before in run.state.replaced.values(), "it finishes its answers"
    assert "digest" in (run.folder.temporary / "models.json").read_text()


@pytest.mark.slow
def test_a_model_that_can_not_start_ends_the_start_with_its_reason(begin: Callable[..., Run]) -> None:
    run = begin(a={}, b={"router": {"breaker_failures": 77}})
    run.thread.join(60)
    assert run.code == [FAILED]
    assert "model-b" in run.out.getvalue()
    assert "it can't be served" in run.out.getvalue()
    assert not run.folder.published


@pytest.mark.slow
def test_a_model_that_dies_too_often_stays_away_and_the_others_are_served_on(begin: Callable[..., Run]) -> None:
    run = begin(a={}, b={"cluster": {"restart_limit": 1}})
    until(lambda: bool(run.folder.published), "both to be served", 60)
    config = run.folder.logs / "b" / "settings.yaml"
    config.write_text(config.read_text().replace("breaker_failures: 5", "breaker_failures: 77"))
    psutil.Process(run.starts("b")[0]).kill()
    until(lambda: "model b stays away" in run.out.getvalue(), "the model to be given up", 60)
    assert len(run.starts("b")) == 2
    assert psutil.pid_exists(run.starts("a")[0])
    assert run.thread.is_alive()


@pytest.mark.slow
def test_a_model_that_is_removed_ends_once_no_router_knows_it_and_one_that_is_added_begins_then(
    begin: Callable[..., Run],
) -> None:
    run = begin(detached=True, a={}, b={})
    until(lambda: bool(run.folder.published), "both to be served", 60)
    router = ModelsState.load(run.folder.temporary).services["router"]
    order = run.order({"c": {"pools": {"decode": 2}}, "d": {}}, "b")
    with pytest.raises(FileExistsError):
        run.order({}, "a")
    until(lambda: ModelsState.load(run.folder.temporary).services["router"] != router, "the next router", 60)
    assert run.routed() == ["a"]
    assert psutil.Process(run.starts("b")[0]).status() != psutil.STATUS_ZOMBIE, "an answer may still run there"
    assert not run.starts("c"), "it may need what b has"
    kept = ModelsState.load(run.folder.temporary).folders["b"]
    state = run.await_end_of(order)
    assert (list(state.configs), list(state.folders), state.trouble) == (["a", "c", "d"], ["a", "c", "d"], "")
    assert run.routed() == ["a", "c", "d"]
    assert not (psutil.pid_exists(run.starts("b")[0]))
    assert not (kept.exists())
    assert [len(run.starts(model)) for model in "abcd"] == [1, 1, 1, 1]
    assert run.folder.published[-1][1] == "a, c, d"
    # Of two GPUs each, the three of c are behind all, and d has what b had.
    assert [run.first_card(model) for model in "acd"] == [0, 2, 5]
    run.await_end_of(run.order({"b": {}}, "c"))
    assert (run.routed(), run.first_card("b")) == (["a", "d", "b"], 2)
    assert len(run.starts("b")) == 2


@pytest.mark.slow
def test_a_model_that_can_not_start_is_not_added_and_nothing_else_is_touched(begin: Callable[..., Run]) -> None:
    run = begin(detached=True, a={}, b={})
    until(lambda: bool(run.folder.published), "both to be served", 60)
    router = ModelsState.load(run.folder.temporary).services["router"]
    state = run.await_end_of(run.order({"c": {"router": {"breaker_failures": 77}}}))
    assert state.trouble.startswith("model c is not added: it could not start (exit code 1)")
    assert "it can't be served" in state.trouble
    assert (list(state.configs), list(state.folders), list(state.cards)) == (["a", "b"], ["a", "b"], ["a", "b"])
    assert (state.services["router"], len(run.starts("c"))) == (router, 1)
    assert run.thread.is_alive()


@pytest.mark.slow
def test_the_next_supervisor_carries_out_what_was_ordered(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before was killed after it had ended the model that is removed: nobody starts that one again."""
    first = begin(detached=True, a={}, b={})
    until(lambda: bool(first.folder.published), "both to be served", 60)
    stopped, goes_on, wait = threading.Event(), threading.Event(), first.stopping.wait

    def stop(seconds: float) -> bool:
        stopped.set()
        goes_on.wait(120)
        return wait(seconds)

    monkeypatch.setattr(first.stopping, "wait", stop)
    assert stopped.wait(60)
    psutil.Process(ModelsState.load(first.folder.temporary).services["model-b"].pid).kill()
    order = first.order({"c": {}}, "b")
    second = begin(detached=True, a={}, b={})
    state = second.await_end_of(order)
    goes_on.set()
    assert (list(state.configs), second.routed(), state.trouble) == (["a", "c"], ["a", "c"], "")
    assert [len(second.starts(model)) for model in "abc"] == [1, 1, 1]


def test_flags_of_one_model_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "models.yaml").write_text("models: {a: {}}")
    options = ServeOptions.of_file(file)
    for given in (replace(options, unset=options.unset - {"model"}), replace(options, unsized=frozenset())):
        with pytest.raises(ConfigError, match="are of one model"):
            plan_models(given)


def card(index: int) -> CardFacts:
    return CardFacts(index, "a card", 1 << 34, 1 << 34, 90, ())


def test_models_have_cards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cluster, "cards_of", lambda setting: tuple(map(card, range(4))))
    config = config_from_dict({"pools": {"decode": 2}})
    assert [one.index for one in model_cluster.own_cards(config, 1)] == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 GPUs besides the 2 of other models"):
        model_cluster.own_cards(config, 2)


def test_the_report_names_the_table_of_the_index_by_a_name_that_stays(tmp_path: Path) -> None:
    to = tmp_path / "m.1.routed"
    for start in ("first", "second"):
        (table := tmp_path / start).write_text(start)
        model_cluster.LinkedRouters(to).tell(RoutedModel("model", "h:1", "s", str(table)))
        told = msgspec.json.decode(to.read_bytes(), type=RoutedModel)
        assert told.kv_index == str(tmp_path / "m.1.kv-index")
        assert Path(told.kv_index).read_text() == start
