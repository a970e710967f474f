"""Workers that are told to leave: by the controller, by Ray, by SIGTERM, by an operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import AdminClient, RouterAway
from twinpool.cli.operator.drain_command import AWAY_S, DrainCommand, ProgressLines, change_role, ending, table
from twinpool.cli.operator.drain_command import DrainReport as Progress
from twinpool.cli.operator.pool_commands import OrderedWorker, follow
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import OperatorNote, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.ray_nodes.ray_facts import NodeDrains
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerLimits, WorkerRecord, WorkerStatus, WorkerView

NAME = WorkerName("decode-1")
WAIT_S = 60.0


class Cluster:
    """A controller with one worker, driven by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(), MemoryLedger())
        self.core.pools.add(NAME, Role.DECODE)
        self.incarnation = Incarnation(0)
        self.role = Role.DECODE
        self.up()

    def up(self) -> StartWorker:
        (start,) = [a for a in self.core.tick() if isinstance(a, StartWorker)]
        self.incarnation, self.role = start.incarnation, start.role
        self.core.register(self.record())
        return start

    def record(self) -> WorkerRecord:
        return WorkerRecord(NAME, self.role, self.incarnation, 7, "n", "e", "c", WorkerLimits(1, 1), "node-of-ray")

    def ended(self) -> list[EndedWorker]:
        """Who has ended, as the next grant says."""
        status = WorkerStatus(NAME, self.role, "ready", 7, "n", self.incarnation, 0, 0, 1, 1)
        return list(self.core.renew(NAME, self.incarnation, status).ended)

    def renew(self, state: str) -> bool:
        """A heartbeat; whether the worker is told to drain."""
        status = WorkerStatus(NAME, self.role, state, 7, "n", self.incarnation, 0, 0, 1, 1)
        return self.core.renew(NAME, self.incarnation, status).drain


def test_a_worker_that_changes_its_role_drains_and_comes_back_as_the_other_kind() -> None:
    cluster = Cluster()
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    assert cluster.renew("ready"), "it is told"
    assert not cluster.renew("draining"), "once"
    cluster.core.leave(NAME, cluster.incarnation)
    row = cluster.core.table.rows[NAME]
    assert not row.served, "it never was one of its new kind"
    start = cluster.up()
    assert cluster.core.table.rows[NAME].served
    assert (start.role, start.incarnation) == (Role.PREFILL, 2)
    (view,) = cluster.core.views()
    assert (view.status.role, view.status.state) == (Role.PREFILL, "ready")
    assert not cluster.renew("ready")


def test_the_process_of_a_closed_worker_goes_on_as_the_other_kind_and_others_hear_that_it_holds_nothing_more() -> None:
    cluster = Cluster()
    for role, number in ((Role.PREFILL, 2), (Role.DECODE, 3)):
        cluster.core.pools.change_role(NAME, role, empty=True)
        assert cluster.core.leave(NAME, cluster.incarnation, closed=True)
        start = cluster.up()
        assert (start.role, start.incarnation, start.successor_of) == (role, number, number - 1)
        assert cluster.ended() == [EndedWorker(NAME, Incarnation(number - 1), Incarnation(1))], "all in one process"
    cluster.core.died(NAME, cluster.incarnation, "killed")
    cluster.clock.advance(60.0)
    assert cluster.up().successor_of == NO_INCARNATION
    assert cluster.ended() == [EndedWorker(NAME, Incarnation(3))], "a death closes nothing"
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.core.leave(NAME, cluster.incarnation, closed=True)
    cluster.up()
    assert cluster.ended() == [EndedWorker(NAME, Incarnation(4), Incarnation(4))], "its process began with it"


@pytest.mark.parametrize("why", ["not closed", "restart", "leaves for good", "cordoned", "nobody starts it"])
def test_a_process_does_not_wait_for_a_plan_that_would_not_come(why: str) -> None:
    cluster = Cluster()
    pools = cluster.core.pools
    match why:
        case "restart":
            pools.restart(NAME)
        case "leaves for good":
            pools.drain(NAME)
        case _:
            pools.change_role(NAME, Role.PREFILL, empty=True)
    if why == "cordoned":
        pools.cordon("n")
    if why == "nobody starts it":
        cluster.core.detach()
    assert not cluster.core.leave(NAME, cluster.incarnation, closed=why != "not closed")
    holds = [EndedWorker(NAME, Incarnation(1), Incarnation(why != "not closed"))]
    assert list(cluster.core.table.ended) == holds, "who says that it is closed is, whether or not its process goes on"
    cluster.core.attach([])
    assert not [a for a in cluster.core.tick() if isinstance(a, StartWorker) and a.successor_of]


def test_a_worker_that_dies_on_its_way_to_another_role_is_started_in_that_role() -> None:
    cluster = Cluster()
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.renew("ready")
    cluster.renew("draining")
    cluster.core.died(NAME, cluster.incarnation, "killed")
    assert cluster.up().role is Role.PREFILL


def test_an_undrained_worker_keeps_its_role() -> None:
    cluster = Cluster()
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.renew("ready")
    cluster.renew("draining")
    cluster.renew("ready")
    cluster.renew("draining")
    cluster.core.leave(NAME, cluster.incarnation)
    actions = cluster.core.tick()
    assert [a for a in actions if isinstance(a, StartWorker)] == []
    assert OperatorNote(f"{NAME} has left") in actions


def test_a_change_of_role_that_is_taken_back_before_the_worker_heard_of_it_is_none() -> None:
    cluster = Cluster()
    cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)
    cluster.core.pools.undrain(NAME)
    assert not cluster.renew("ready")
    cluster.renew("draining")
    cluster.core.leave(NAME, cluster.incarnation)
    assert not [a for a in cluster.core.tick() if isinstance(a, StartWorker)]


def test_only_a_ready_worker_of_the_other_kind_can_change_its_role() -> None:
    cluster = Cluster()
    with pytest.raises(ConfigError, match="already"):
        cluster.core.pools.change_role(NAME, Role.DECODE, empty=True)
    with pytest.raises(ConfigError, match="unknown"):
        cluster.core.pools.change_role(WorkerName("decode-9"), Role.PREFILL)
    with pytest.raises(ConfigError, match="a colocated one has both"):
        cluster.core.pools.change_role(NAME, Role.COLOCATED, empty=True)
    cluster.renew("draining")
    with pytest.raises(ConfigError, match="only a ready worker"):
        cluster.core.pools.change_role(NAME, Role.PREFILL, empty=True)


def test_a_node_that_ray_takes_away_drains_its_workers_once() -> None:
    cluster = Cluster()
    asked, answered = threading.Event(), threading.Event()
    nodes: dict[str, int] = {}

    def ask() -> dict[str, int]:
        asked.set()
        answered.wait(WAIT_S)
        return nodes

    drains = NodeDrains(ask, every_s=0.001)
    assert drains.due(cluster.core.views()) == []
    nodes["node-of-ray"] = 0
    drains.start()
    try:
        assert asked.wait(WAIT_S)
        assert drains.due(cluster.core.views()) == [], "a store that doesn't answer holds nobody up"
        answered.set()
        due: list[str] = []
        while not due:
            due = drains.due(cluster.core.views())
        assert due == ["node-of-ray"]
        assert drains.due(cluster.core.views()) == due, "the controller may be away"
        assert drains.changed
        drains.told("node-of-ray")
        assert not drains.changed
        assert drains.due(cluster.core.views()) == []
    finally:
        drains.close()
    assert cluster.core.pools.drain("node-of-ray") == (NAME,)
    assert cluster.renew("ready")
    assert not cluster.renew("draining")
    assert not cluster.core.pools.drain(NAME), "it drains already"
    cluster.core.leave(NAME, cluster.incarnation)
    assert not [a for a in cluster.core.tick() if isinstance(a, StartWorker)]


def test_a_node_that_ray_keeps_after_all_and_takes_away_later_is_drained_again() -> None:
    """Asked as `serve` asks: the controller's table is fetched only where there is news."""
    cluster, drains = Cluster(), NodeDrains(dict)

    def due(*draining: str) -> list[str]:
        drains._nodes = dict.fromkeys(draining, 0)
        found = drains.due(cluster.core.views()) if drains.changed else []
        for node in found:
            drains.told(node)
        return found

    assert due("node-of-ray") == ["node-of-ray"]
    assert due("node-of-ray") == []
    assert due("node-of-ray", "another") == [], "nobody works on the other one"
    assert due("another") == []
    assert due("node-of-ray", "another") == ["node-of-ray"]


def test_workers_of_other_nodes_stay() -> None:
    cluster = Cluster()
    drains = NodeDrains(dict)
    drains._nodes = {"another": 1}
    assert drains.due(cluster.core.views()) == []
    views = [WorkerView(v.record, v.status) for v in cluster.core.views()]
    drains._nodes = {"": 1}
    assert drains.due(views) == []


SIGNALLED = """
import os, signal, sys, threading
from twinpool.cluster.worker_process.worker_process import TERMINATED
told = threading.Event()
assert TERMINATED.listen()
TERMINATED.on(told.set)
lock = threading.Lock()
lock.acquire()
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
def end():
    ok = told.wait(60)
    late = threading.Event()
    TERMINATED.on(late.set)
    os._exit(0 if ok and late.is_set() else 1)
threading.Thread(target=end).start()
lock.acquire()  # the main thread runs no Python any more
"""


def test_sigterm_is_heard_while_the_main_thread_is_busy_elsewhere() -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED], env=os.environ | {"PYTHONPATH": root}, timeout=60, check=True
    )
    assert done.returncode == 0


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RouterStub]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with router_stub() as running:
        yield running


def operator(stub: RouterStub) -> AdminClient:
    clock = ManualClock()
    return AdminClient(stub.url, clock.now, lambda s: clock.advance(2.0))


BUSY = row("decode-0", "draining", running=3, waiting=1, outgoing=2)
BUSY["counters"] = {
    "left_to_finish": 1.0, "leaving": 1.0, "outgoing_to:decode-2": 2.0, "migrated_out": 5.0, "migrated_out_bytes": 3e6,
}  # fmt: skip


def test_a_drain_says_what_it_waits_for_and_what_it_did(stub: RouterStub) -> None:
    stub.tables = [[BUSY], [row("decode-0", "left")]]
    said: list[str] = []
    seen: list[Progress] = []

    def show(report: Progress) -> None:
        seen.append(report)
        ProgressLines(said.append).show(report)
        assert table(report).row_count == 1

    report = DrainCommand(operator(stub), "decode-0", force=False, timeout_s=60.0, show=show).run()
    assert said == [
        "decode-0 is draining: waits for 3 running (1 to finish here, 1 on the way to other workers), 1 waiting, "
        "2 outgoing transfers (2 to decode-2)"
    ]
    assert ending(report) == "decode-0 has left after 2.0 s; 5 requests migrated, 3.0 MB"
    shown = json.loads(json.dumps(seen[0].as_json()))
    assert shown["workers"][0]["outgoing_to"] == {"decode-2": 2}


def test_when_time_is_up_force_starts_over_elsewhere_what_is_left(stub: RouterStub) -> None:
    stub.tables = [[BUSY]] * 4 + [[row("decode-0", "left")]]
    stub.report = {"taken": 3}
    answer = stub.answer

    def answering(method: str, path: str) -> tuple[int, dict[str, Any]]:
        status, body = answer(method, path)
        return status, {"taken": 3} if path.endswith("now=true") else body

    stub.answer = answering  # type: ignore[method-assign]
    report = DrainCommand(operator(stub), "decode-0", force=True, timeout_s=5.0).run()
    assert report.left
    assert report.restarted == 3
    assert ("POST", "/cluster/drain/decode-0?now=true") in stub.calls
    assert "3 started over elsewhere" in ending(report)


def test_without_force_the_drain_goes_on_and_the_command_says_so(
    stub: RouterStub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.tables = [[BUSY]]
    code = cli.run(
        command_line.parser().parse_args(["drain", "decode-0", "--url", stub.url, "--timeout", "0.01", "--json"])
    )
    out = capsys.readouterr()
    assert code == 1
    assert "it goes on draining" in out.err
    assert json.loads(out.out)["left"] is False
    assert not [path for _, path in stub.calls if "now=true" in path]


def test_a_node_has_left_when_all_its_workers_have(stub: RouterStub) -> None:
    names = ["decode-0", "prefill-0"]
    stub.tables = [[BUSY, row("prefill-0", "left")], [row("decode-0", "left"), row("prefill-0", "left")]]
    answer = stub.answer

    def answering(method: str, path: str) -> tuple[int, dict[str, Any]]:
        status, body = answer(method, path)
        return status, of_node(*(row(n, "draining") for n in names)) if path.startswith("/cluster/drain") else body

    stub.answer = answering  # type: ignore[method-assign]
    report = DrainCommand(operator(stub), "some-host", force=False, timeout_s=60.0).run()
    assert report.left
    assert [w.name for w in report.workers] == names


AWAY: list[dict[str, Any]] = []
"""What is seen while no router answers."""


class Drained:
    """A drain command against what a router says at each look."""

    def __init__(self, answer: dict[str, Any], *looks: list[dict[str, Any]]) -> None:
        self.answer, self.looks, self.time = answer, list(looks), 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += 1.0

    def call(self, method: str, path: str) -> dict[str, Any]:
        self.calls.append(path)
        return self.answer

    def rows(self) -> list[dict[str, Any]]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if look is AWAY:
            raise RouterAway("no router answers")
        return look

    def run(self, target: str = "b", timeout_s: float = 60.0) -> Progress:
        return DrainCommand(self, target, force=False, timeout_s=timeout_s).run()  # type: ignore[arg-type]


def at(name: str, state: str, node: str = "b", **changes: Any) -> dict[str, Any]:
    return row(name, state, node=node, node_id=f"{node}-0123456789", **changes)


def of_node(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"is_node": True, "workers": list(rows)}


def test_force_waits_for_a_router_that_goes_away_just_then_and_asks_it_again() -> None:
    looks = [[at("decode-0", "draining", running=1)]] * 8 + [[at("decode-0", "left")]]
    drained, asked = Drained({"name": "decode-0"}, *looks), []

    def call(method: str, path: str) -> dict[str, Any]:
        if not path.endswith("now=true"):
            return {"name": "decode-0"}
        asked.append(drained.time)
        if len(asked) < 3:
            raise RouterAway("no router answers")
        return {"taken": 2}

    drained.call = call  # type: ignore[method-assign]
    report = DrainCommand(drained, "decode-0", force=True, timeout_s=2.0).run()  # type: ignore[arg-type]
    assert (report.left, report.restarted, len(asked)) == (True, 2, 3)


def test_a_node_has_not_left_while_a_worker_that_drained_before_still_has_a_stream() -> None:
    """The command follows whoever is on the node, not only those that it told itself."""
    stays = at("decode-1", "draining", running=1)
    answer = of_node(at("decode-2", "draining"), stays)
    report = Drained(answer, [stays, at("decode-2", "left")]).run(timeout_s=5.0)
    assert not report.left
    assert "decode-1 waits for 1 running" in report.why
    assert {w.name: w.state for w in report.workers} == {"decode-1": "draining", "decode-2": "left"}


@pytest.mark.parametrize("name", ["b", "b-012345"])
def test_a_worker_of_the_node_that_the_answer_did_not_name_is_followed_as_well(name: str) -> None:
    """Its drain began elsewhere, or it registered just then."""
    looks = [
        [at("decode-1", "ready"), at("decode-3", "ready", node="a")],
        [at("decode-1", "draining", running=1)],
        [at("decode-1", "left")],
    ]
    report = Drained(of_node(), *looks).run(name)
    assert [(w.name, w.state) for w in report.workers] == [("decode-1", "left")]
    report = Drained(of_node(at("decode-2", "draining")), [at("decode-2", "draining"), *looks[0]], *looks[1:]).run(
        name, timeout_s=5.0
    )
    assert not report.left, "decode-2 has no row any more: it isn't known to have left"
    assert {w.name: w.state for w in report.workers} == {"decode-1": "left", "decode-2": "draining"}


def test_no_row_is_not_taken_for_having_left() -> None:
    report = Drained({"name": "decode-1", "workers": [at("decode-1", "draining")]}, []).run("decode-1", timeout_s=5.0)
    assert not report.left
    assert "it goes on draining" in report.why


def test_a_drain_outlives_the_router_that_was_asked() -> None:
    busy = at("decode-1", "draining", running=1)
    looks = [[busy], *[AWAY] * 20, [busy], [at("decode-1", "left")]]
    command = Drained({"workers": [busy], "name": "decode-1"}, *looks)
    report = command.run("decode-1")
    assert report.left
    assert command.calls == ["/cluster/drain/decode-1"], "asked once: it goes on at the worker"
    looks = [*[[busy]] * 3, *[AWAY] * 3, [at("decode-1", "left")]]
    late = Drained({"workers": [busy], "name": "decode-1"}, *looks).run("decode-1", timeout_s=4.0)
    assert late.left, "what was seen before it was away is not what is so when time is up"


def test_a_router_that_does_not_come_back_leaves_the_end_unknown() -> None:
    busy = at("decode-1", "draining", running=1)
    report = Drained({"workers": [busy], "name": "decode-1"}, [busy], AWAY).run("decode-1", timeout_s=600.0)
    assert not report.left
    assert "isn't known" in report.why
    assert report.seconds < 600


def test_who_was_gone_from_the_node_before_the_drain_is_no_part_of_it() -> None:
    gone = [at("decode-7", "dead"), at("decode-8", "left")]
    looks = [[*gone, at("decode-1", state)] for state in ("draining", "left")]
    report = Drained(of_node(at("decode-1", "draining")), *looks).run()
    assert report.left
    assert [(w.name, w.state) for w in report.workers] == [("decode-1", "left")]


def drained_in_spells(*looks: list[dict[str, Any]]) -> bool:
    return Drained({"workers": [row("decode-1", "draining")], "name": "decode-1"}, *looks).run("decode-1", 900.0).left


def changed_in_spells(*looks: list[dict[str, Any]]) -> bool:
    command: Any = Drained({"incarnation": 1}, *looks, [row("decode-1", incarnation=2, role="prefill")])
    return change_role(command, "decode-1", "prefill", force=False, timeout_s=900.0).left


def followed_in_spells(*looks: list[dict[str, Any]]) -> bool:
    command: Any = Drained({}, *looks)
    return follow(command, [OrderedWorker("decode-1", 1, "leaves")], 900.0, lambda line: None) > 0.0


@pytest.mark.parametrize("ordered", [drained_in_spells, changed_in_spells, followed_in_spells])
def test_a_router_that_is_away_twice_is_waited_for_as_long_each_time(
    ordered: Callable[..., bool],
) -> None:
    busy, last = row("decode-1", "draining", running=1), row("decode-1", "left")
    if ordered is changed_in_spells:
        last = busy
    spell = [AWAY] * int(AWAY_S * 0.7)
    assert ordered([busy], *spell, [busy], *spell, [last])


def test_what_became_of_each_worker_of_a_node_is_told_apart() -> None:
    looks = [
        [at("a-0", "draining"), at("a-1", "draining"), at("a-2", "dead"), at("a-3", "starting"), at("a-4", "draining")],
        [at("a-0", "left"), at("a-1", "unreachable"), at("a-2", "dead"), at("a-3", "starting", node="", incarnation=2),
         at("a-4", "draining")],
        [at("a-0", "left"), at("a-1", "left"), at("a-2", "dead"), at("a-3", "ready", node="a", incarnation=2),
         at("a-4", "dead")],
    ]  # fmt: skip
    rows = [at(f"a-{i}", s) for i, s in enumerate(["draining", "draining", "dead", "starting", "draining"])]
    report = Drained(of_node(*rows), *looks).run()
    states = {w.name: w.state for w in report.workers}
    assert states == {"a-0": "left", "a-1": "left", "a-2": "not running", "a-3": "elsewhere", "a-4": "died"}
    assert not report.left
    assert report.why == "a-4 died while it was draining"


def test_one_that_has_not_heard_yet_is_waited_for_and_not_called_undrained() -> None:
    """The other drains already; this one hears of it by its next heartbeat."""
    looks = [
        [at("decode-1", "draining"), at("decode-2", "unreachable")],
        [at("decode-1", "draining"), at("decode-2", "ready")],
        [at("decode-1", "left"), at("decode-2", "draining")],
        [at("decode-1", "left"), at("decode-2", "left")],
    ]
    assert Drained(of_node(at("decode-1", "draining"), at("decode-2", "unreachable")), *looks).run().left
    looks[2] = looks[3] = [at("decode-1", "draining"), at("decode-2", "ready")]
    looks[1] = [at("decode-1", "draining"), at("decode-2", "draining")]
    report = Drained(of_node(at("decode-1", "draining"), at("decode-2", "draining")), *looks).run()
    assert report.why == "decode-2 was undrained and stays"


def test_a_role_is_changed_though_the_router_restarts_meanwhile() -> None:
    before, after = row("decode-1", "draining"), row("decode-1", "ready", incarnation=2, role="prefill")
    command = Drained({"incarnation": 1}, [before], *[AWAY] * 5, [after])
    report = change_role(command, "decode-1", "prefill", force=False, timeout_s=60.0)  # type: ignore[arg-type]
    assert report.left


def test_undrain_says_what_becomes_of_each_and_fails_when_one_was_not_reached(
    stub: RouterStub, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [at("decode-1", "ready", outcome="admits again"), at("decode-2", "left", outcome="starts again")]
    later = [at("decode-1", "ready"), at("decode-2", "ready", incarnation=2)]
    stub.answer = lambda method, path: (200, {"workers": rows if method == "POST" else later})  # type: ignore[method-assign]
    assert cli.run(command_line.parser().parse_args(["undrain", "b", "--url", stub.url])) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["decode-1 admits again", "decode-2 starts again"]
    assert out[2:4] == ["decode-1 serves on b", "decode-2 serves on b"]
    rows.append(at("decode-3", "unreachable", outcome="can't be reached: no answer in time"))
    assert cli.run(command_line.parser().parse_args(["undrain", "b", "--url", stub.url])) == 1
    assert "decode-3 can't be reached" in capsys.readouterr().out
