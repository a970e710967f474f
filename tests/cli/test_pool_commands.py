"""`twinpool add`, `scale`, `restart`, `cordon`: what is ordered, what is waited for, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import AdminClient, CommandRefused
from twinpool.cli.operator.pool_commands import OrderedWorker, follow, order, parse_sizes
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ConfigError


class Scene:
    """A client whose sleeps are a manual clock's."""

    def __init__(self, stub: RouterStub) -> None:
        self.clock = ManualClock()
        self.client = AdminClient(stub.url, self.clock.now, self.clock.advance)
        self.said: list[str] = []

    def follow(self, *workers: OrderedWorker, timeout_s: float = 60.0) -> float:
        return follow(self.client, workers, timeout_s, self.said.append)


def test_orders_are_calls_of_the_router() -> None:
    with router_stub() as stub:
        scene = Scene(stub)
        stub.ordered = [{"name": "decode-1", "incarnation": 4, "outcome": "leaves"}]
        assert order(scene.client, "scale", prefill="0", decode="2", force="") == [
            OrderedWorker("decode-1", 4, "leaves")
        ]
        order(scene.client, "add", role="decode", count=2, node="a b")
        assert stub.calls == [
            ("POST", "/cluster/scale?prefill=0&decode=2"),
            ("POST", "/cluster/add?role=decode&count=2&node=a+b"),
        ]


def test_a_start_is_done_when_the_next_incarnation_serves_and_a_leave_when_it_has_left() -> None:
    with router_stub() as stub:
        scene = Scene(stub)
        stub.tables = [
            [row("decode-0", "draining", incarnation=3), row("decode-1", "ready", incarnation=1)],
            [row("decode-0", "starting", incarnation=4), row("decode-1", "draining", incarnation=1)],
            [row("decode-0", "ready", incarnation=4, node="far"), row("decode-1", "left", incarnation=1)],
        ]
        seconds = scene.follow(
            OrderedWorker("decode-0", 3, "leaves and starts again"), OrderedWorker("decode-1", 1, "leaves")
        )
        assert scene.said == ["decode-0 serves on far", "decode-1 has left"]
        assert seconds == pytest.approx(0.4)


def test_what_is_not_done_in_time_is_named_with_why() -> None:
    with router_stub() as stub:
        scene = Scene(stub)
        stub.tables = [[row("decode-0", "dead", last_end="no room")]]
        with pytest.raises(
            CommandRefused, match=r"decode-0 is dead \(last ended: no room\) and should serve; prefill-7"
        ):
            scene.follow(OrderedWorker("decode-0", 1, "starts"), OrderedWorker("prefill-7", 0, "starts"))
        assert any("no room" in line for line in scene.said), "it is said while it is waited for"


def test_while_no_router_answers_a_worker_is_as_it_was_last_seen() -> None:
    """The table is away, and not the worker from it."""
    with router_stub() as stub:
        scene = Scene(stub)
        starting = row("decode-0", "starting", incarnation=2, last_end="exit code 1")

        def answer(method: str, path: str) -> tuple[int, dict[str, Any]]:
            away = 1.0 < scene.clock.now() < 50.0
            serves = row("decode-0", incarnation=2) if scene.clock.now() > 50.0 else starting
            return (503, {"error": {"message": "wait", "code": "starting"}}) if away else (200, {"workers": [serves]})

        stub.answer = answer  # type: ignore[method-assign]
        scene.follow(OrderedWorker("decode-0", 1, "starts"))
        *waits, done = scene.said
        assert done == "decode-0 serves on here"
        assert waits, "it is said now and then"
        assert set(waits) == {"decode-0 is starting (last ended: exit code 1) and should serve"}


@pytest.mark.parametrize("words", [["decode"], ["decode=x"], ["cook=1"], ["decode=1", "decode=2"], ["decode=-1"]])
def test_sizes_that_mean_nothing_are_wrong_usage(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="scale"):
        parse_sizes(words)


def twinpool(*arguments: str) -> int:
    return cli.run(command_line.parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["add", "decode", "--count", "2", "--node", "n"], "/cluster/add?role=decode&count=2&node=n"),
        (["scale", "prefill=2", "decode=0", "--force"], "/cluster/scale?prefill=2&decode=0&force=true"),
        (["restart", "decode-0", "--force"], "/cluster/restart/decode-0?force=true"),
        (["cordon", "a/b"], "/cluster/cordon/a%2Fb"),
        (["uncordon", "n"], "/cluster/uncordon/n"),
    ],
)
def test_each_command_gives_its_order(arguments: list[str], path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with router_stub() as stub:
        stub.ordered = [{"name": "decode-9", "incarnation": 0, "outcome": "starts"}]
        wait = ["--no-wait"] if arguments[0] in ("add", "scale", "restart") else []
        assert twinpool(*arguments, *wait, "--url", stub.url) == 0
        assert stub.calls == [("POST", path)]
        assert "decode-9 starts" in capsys.readouterr().out


def test_a_refusal_is_exit_code_1_with_the_routers_words(capsys: pytest.CaptureFixture[str]) -> None:
    with router_stub() as stub:
        stub.refusal = (409, "there is no such node")
        assert twinpool("add", "decode", "--node", "x", "--url", stub.url) == 1
        assert "there is no such node" in capsys.readouterr().err


def test_status_watch_shows_the_workers_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[Any] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with router_stub() as stub:
        client = AdminClient(stub.url, sleep=sleep)
        monkeypatch.setattr(AdminClient, "at", lambda *given: client)
        stub.tables = [[row("decode-0", "starting")], [row("decode-0", "ready")]]
        assert twinpool("status", "--watch", "--url", stub.url) == 130
        out = capsys.readouterr().out
        assert out.index("starting") < out.index("ready")
        assert out.count("decode-0") == 3
