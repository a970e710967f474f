"""`twinpool drain` and `twinpool role`: whom a drain is about, what is done when time is up, and how each ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import AdminClient, CommandRefused, RouterAway
from twinpool.cli.operator.drain_command import (
    AWAY_S,
    HURRY_S,
    DrainCommand,
    DrainProgress,
    DrainReport,
    change_role,
    ending,
    table,
)
from twinpool.cli.operator.pool_commands import OrderedWorker, follow
from twinpool.contracts.clock import ManualClock

LONG_S = 3600.0
NODE_ID = "abcdef1234567890"
STARTING = (503, {"error": {"message": "wait", "code": "starting"}})


class Drained(RouterStub):
    """`order` is the answer to a drain; `taken` requests are started over when that is asked for, after which `tables`
    are the next ones. While the time is in `away` it has no table yet."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.order: dict[str, Any] = {}
        self.taken = 0
        self.after: list[list[dict[str, Any]]] = []
        self.away = range(0)

    def answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        if int(self.clock.now()) in self.away:
            return STARTING
        if path.endswith("?now=true"):
            self.calls.append((method, path))
            self.tables = self.after or self.tables
            return 200, {"taken": self.taken}
        status, answer = super().answer(method, path)
        return status, self.order if "/cluster/drain/" in path or "/cluster/role/" in path else answer

    def client(self, pause_s: float = 1.0) -> AdminClient:
        def sleep(seconds: float) -> None:
            self.clock.advance(pause_s)
            assert self.clock.now() < LONG_S, "it waits for ever"

        return AdminClient(self.url, self.clock.now, sleep)

    def drain(
        self, target: str, *, force: bool = False, timeout_s: float = 10.0, pause_s: float = 1.0,
        show: Callable[[DrainReport], None] = lambda report: None,
    ) -> DrainReport:  # fmt: skip
        return DrainCommand(self.client(pause_s), target, force=force, timeout_s=timeout_s, show=show).run()

    @property
    def hurried(self) -> int:
        return sum(path.endswith("?now=true") for _, path in self.calls)


@pytest.fixture
def stub() -> Iterator[Drained]:
    with router_stub(Drained()) as made:
        yield made


@pytest.mark.parametrize("target", ["n", NODE_ID[:8], NODE_ID])
def test_a_drain_of_a_node_is_about_those_on_it_and_those_that_start_there_meanwhile(
    stub: Drained, target: str
) -> None:
    def on_it(name: str, state: str) -> dict[str, Any]:
        return row(name, state, node="n", node_id=NODE_ID)

    elsewhere = row("decode-7", "ready", node="other", node_id="fedcba0987654321")
    stub.order = {"is_node": True, "workers": [{"name": "decode-0", "state": "draining", "incarnation": 1}]}
    stub.tables = [
        [on_it("decode-0", "draining"), on_it("decode-8", "left"), on_it("decode-9", "dead"), elsewhere],
        [on_it("decode-0", "left"), on_it("decode-1", "starting"), elsewhere],
        [on_it("decode-0", "left"), on_it("decode-1", "draining"), elsewhere],
        [on_it("decode-0", "left"), on_it("decode-1", "left"), elsewhere],
    ]
    report = stub.drain(target)
    assert report.left
    assert [worker.name for worker in report.workers] == ["decode-0", "decode-1"]
    assert report.seconds == 3.0


def test_a_node_is_not_named_by_the_first_few_digits_of_its_id(stub: Drained) -> None:
    stub.order = {"is_node": True, "workers": []}
    stub.tables = [[row("decode-0", "draining", node="n", node_id=NODE_ID)]]
    assert stub.drain(NODE_ID[:7]).workers == ()


def test_a_drain_of_a_worker_is_about_nobody_else(stub: Drained) -> None:
    stub.tables = [[row("decode-0", "draining"), row("decode-1", "draining")], [row("decode-0", "left")]]
    report = stub.drain("decode-0")
    assert (report.left, [worker.name for worker in report.workers]) == (True, ["decode-0"])


def test_when_time_is_up_a_forced_drain_has_the_rest_started_over_once(stub: Drained) -> None:
    stub.taken = 2
    stub.tables = [
        [row("decode-0", "draining", running=2, counters={"migrated_out": 3.0, "migrated_out_bytes": 1.5e6})]
    ]
    stub.after = [[row("decode-0", "draining", running=1)], [row("decode-0", "left")]]
    report = stub.drain("decode-0", force=True)
    assert stub.hurried == 1
    assert ending(report) == "decode-0 has left after 12.0 s; 2 started over elsewhere"


def test_a_forced_drain_that_does_not_end_though_is_given_up_and_says_what_was_done(stub: Drained) -> None:
    stub.tables = [[row("decode-0", "draining", running=2)]]
    report = stub.drain("decode-0", force=True, pause_s=5.0)
    assert stub.hurried == 1
    assert not report.left
    assert report.seconds == 10.0 + HURRY_S
    assert "though what others could take was started over there; decode-0 waits for 2 running" in report.why


def test_a_drain_that_is_not_forced_starts_nothing_over(stub: Drained) -> None:
    stub.tables = [[row("decode-0", "draining", running=2)]]
    report = stub.drain("decode-0", pause_s=5.0)
    assert stub.hurried == 0
    assert report.why == "decode-0 has not left after 10 s; decode-0 waits for 2 running; it goes on draining"


def test_a_router_that_is_away_when_time_is_up_is_asked_again_to_start_the_rest_over(stub: Drained) -> None:
    stub.tables = [[row("decode-0", "draining", running=2)]]
    stub.after = [[row("decode-0", "left")]]
    client = stub.client()
    hurry = DrainCommand(client, "decode-0", force=True, timeout_s=10.0)
    asked = list[str]()
    call = client.call

    def away_once(method: str, path: str, *given: Any, **more: Any) -> dict[str, Any]:
        if path.endswith("?now=true"):
            asked.append(path)
            if len(asked) == 1:
                raise RouterAway("it is away")
        return call(method, path, *given, **more)

    client.call = away_once  # type: ignore[method-assign]
    assert hurry.run().left
    assert len(asked) == 2


def test_what_a_worker_waits_for_is_told_part_by_part_and_what_it_sent_is_added_up(stub: Drained) -> None:
    counters = {
        "left_to_finish": 1.0, "leaving": 2.0, "outgoing_to:decode-2": 1.0, "outgoing_to:decode-1": 3.0,
        "migrated_out": 3.0, "migrated_out_bytes": 1.5e6,
    }  # fmt: skip
    stub.tables = [
        [row("decode-0", "draining", running=3, waiting=4, outgoing=4, counters=counters)], [row("decode-0", "left")]
    ]  # fmt: skip
    seen = list[DrainReport]()
    report = stub.drain("decode-0", show=seen.append)
    (worker,) = seen[0].workers
    assert worker.waits_for == (
        "3 running (1 to finish here, 2 on the way to other workers), 4 waiting, "
        "4 outgoing transfers (3 to decode-1, 1 to decode-2)"
    )
    assert ending(report) == "decode-0 has left after 1.0 s; 3 requests migrated, 1.5 MB"
    shown = table(seen[0])
    assert [list(column.cells) for column in shown.columns] == [
        ["decode-0"], ["draining"], ["3"], ["1"], ["2"], ["4"], ["4"], ["3"], ["1.5"], [worker.waits_for]
    ]  # fmt: skip
    assert [list(column.cells) for column in table(report).columns][-1] == [""]


def test_a_worker_that_died_before_it_was_told_to_leave_was_not_running() -> None:
    dead = row("decode-0", "dead")
    assert DrainProgress.of(dead, None, here=True).state == "not running"
    assert DrainProgress.of(dead, DrainProgress("decode-0", "draining", incarnation=1), here=True).state == "died"
    again = row("decode-0", "ready", incarnation=2)
    assert (
        DrainProgress.of(again, DrainProgress("decode-0", "draining", incarnation=1), here=False).state == "elsewhere"
    )


@pytest.fixture
def commands(stub: Drained, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command whose sleeps are the stub's clock's."""
    client = stub.client()
    monkeypatch.setattr(AdminClient, "at", lambda *given: client)
    return lambda *words: cli.run(command_line.parser().parse_args([*words, "--url", stub.url]))


def test_the_command_says_how_a_drain_ended(
    stub: Drained, commands: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stub.tables = [[row("decode-0", "draining", running=2)], [row("decode-0", "left")]]
    assert commands("drain", "decode-0") == 0
    assert capsys.readouterr().out.splitlines() == [
        "decode-0 is draining: waits for 2 running", "decode-0 has left after 1.0 s"
    ]  # fmt: skip
    stub.tables = [[row("decode-0", "draining", running=2)]]
    assert commands("drain", "decode-0", "--timeout", "5") == 1
    assert "\nerror: decode-0 has not left after 5 s" in capsys.readouterr().err
    assert commands("drain", "decode-0", "--no-wait") == 0
    assert capsys.readouterr().out == "decode-0 drains\n"


def test_the_command_tells_programs_the_same_in_json(
    stub: Drained, commands: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stub.tables = [[row("decode-0", "draining", running=2)], [row("decode-0", "left")]]
    assert commands("drain", "decode-0", "--json", "--watch") == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["left"], first["workers"][0]["waits_for"]) == (False, "2 running")
    assert (last["left"], last["why"], last["workers"][0]["waits_for"]) == (True, "", "")
    stub.tables = [[row("decode-0", "ready")], [row("decode-0", "draining")], [row("decode-0", "ready")]]
    assert commands("drain", "decode-0", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["why"] == "decode-0 was undrained and stays"
    assert err.endswith("\nerror: decode-0 was undrained and stays\n")


# ---------------------------------------------------------------- another role


def test_a_role_is_changed_once_the_next_incarnation_serves_in_it(stub: Drained) -> None:
    stub.order = {"incarnation": 3}
    stub.tables = [
        [row("decode-0", "draining", incarnation=3, running=1)],
        [row("decode-0", "starting", incarnation=4, role="prefill")],
        [row("decode-0", "ready", incarnation=4, role="decode")],
        [row("decode-0", "ready", incarnation=4, role="prefill")],
    ]
    report = change_role(stub.client(), "decode-0", "prefill", force=True, timeout_s=10.0)
    assert stub.calls[0] == ("POST", "/cluster/role/decode-0?role=prefill&force=true")
    assert (report.left, report.seconds) == (True, 3.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("decode-0", "left", incarnation=3)], "decode-0 has left and didn't come back"),
        ([row("decode-0", "draining", incarnation=3, running=2)], "after 15 s; it waits for 2 running"),
        ([row("decode-0", "starting", incarnation=4, role="prefill")], "after 15 s; it waits for its start"),
        ([], "after 15 s; it waits for its start"),
    ],
)
def test_a_role_that_does_not_come_is_a_refusal_with_what_is_waited_for(
    stub: Drained, rows: list[dict[str, Any]], words: str
) -> None:
    stub.order, stub.tables = {"incarnation": 3}, [rows]
    with pytest.raises(CommandRefused, match=words):
        change_role(stub.client(pause_s=5.0), "decode-0", "prefill", force=False, timeout_s=10.0)


@pytest.mark.parametrize("timeout_s", [30.0, 1000.0])
def test_a_router_that_stays_away_is_waited_for_for_a_while_and_no_longer_than_the_command(
    stub: Drained, timeout_s: float
) -> None:
    stub.order, stub.tables = {"incarnation": 3}, [[row("decode-0", "draining", incarnation=3)]]
    least, client = min(AWAY_S, timeout_s), stub.client(pause_s=10.0)
    one = OrderedWorker("decode-0", 3, "starts")
    waits: list[Callable[[], object]] = [
        lambda: change_role(client, "decode-0", "prefill", force=False, timeout_s=timeout_s),
        lambda: follow(client, [one], timeout_s, lambda line: None),
    ]
    for wait in waits:
        stub.away, began = range(0), stub.clock.now()
        stub.away = range(int(began) + 2, 10**6)
        with pytest.raises(RouterAway if timeout_s > AWAY_S else (RouterAway, CommandRefused)):
            wait()
        assert least <= stub.clock.now() - began <= least + 10
    began = stub.clock.now()
    stub.away = range(int(began) + 2, 10**6)
    report = DrainCommand(client, "decode-0", force=False, timeout_s=timeout_s).run()
    assert "what has become of decode-0 isn't known, and its workers go on draining" in report.why
    assert least <= report.seconds <= least + 10
