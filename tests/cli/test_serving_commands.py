"""`twinpool weights`, `flush`, `pause`, `resume`, `sleep`, `wake`, `adapters`: what is asked for, when it is over, and
what is said."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch
from safetensors.torch import load

from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.admin_client import POLL_S, CommandRefused, RouterAway
from twinpool.cli.operator import pool_commands
from twinpool.cli.operator.push_weights import push_weights

PARSER = command_line.parser()


def worker(state: str = "ready", *, paused: bool = False, prepared: bool = False) -> dict[str, Any]:
    return {"name": "w", "state": state, "weights_version": "v1", "prepared": prepared, "paused": paused}


def served(*workers: dict[str, Any], tried: int = 1, **told: Any) -> dict[str, Any]:
    """What `GET /v1/weights` tells."""
    usual = {"weights": {"path": ""}, "weights_version": "v1", "pending": None, "failed": "", "behind": 0, "asleep": 0}
    return {**usual, "paused": False, "tried": tried, "workers": list(workers or (worker(), worker())), **told}


class Operator:
    """A client of operators: it finds `looks`, one after the other and the last one from then on."""

    def __init__(self) -> None:
        self.before: Any = served(tried=0)
        self.looks: list[Any] = [served()]
        self.ordered: list[tuple[str, Any]] = []
        self.seconds = 0.0
        self.changes: list[bool] = []

    def clock(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def call(self, method: str, path: str, body: bytes | None = None) -> Any:
        if method == "POST":
            self.ordered.append((path, json.loads(body or b"{}")))
            return {}
        if path == "/cluster/status":
            return {"adapters": [{"name": "mine", "digest": "d" * 64, "path": "/a", "workers": 2}]}
        found = self.before if not self.ordered else self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator()

    def client_for(url: object, ca: object, model: object, *, changes: bool) -> tuple[Operator, object]:
        made.changes.append(changes)
        return made, SimpleNamespace()

    monkeypatch.setattr(pool_commands, "client_for", client_for)
    return made


def twinpool(*words: str) -> int:
    return cli.run(PARSER.parse_args([*words]))


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        ("weights update /w", "weights", {"path": "/w", "version": "", "rolling": False}),
        (
            "weights update /w --version v2 --rolling --wait 0",
            "weights",
            {"path": "/w", "version": "v2", "rolling": True, "wait_s": 0.0},
        ),
        ("flush", "flush", {}),
        ("flush --wait 2.5", "flush", {"wait_s": 2.5}),
        ("pause", "pause", {}),
        ("resume", "resume", {}),
        ("sleep", "sleep", {"level": 1}),
        ("sleep --level 2 --wait 9", "sleep", {"level": 2, "wait_s": 9.0}),
        ("wake", "wake", {}),
    ],
)
def test_orders_are_calls_of_the_router(operator: Operator, words: str, path: str, body: dict[str, Any]) -> None:
    assert twinpool(*words.split(), "--no-wait") == 0
    assert operator.ordered == [(f"/v1/{path}", {**body, "wait": False})]
    assert operator.changes == [True]
    assert operator.seconds == 0.0


AWAY = RouterAway("away")


@pytest.mark.parametrize(
    ("words", "not_yet", "at_last"),
    [
        (
            "weights update /w",
            [
                served(tried=0),
                served(pending={"path": "/w"}),
                served(behind=1),
                AWAY,
                served(worker(), worker("draining")),
                served(worker("left")),
            ],
            served(worker(), worker("left")),
        ),
        ("flush", [served(tried=0), served(behind=2), served(worker("starting"))], served(worker())),
        (
            "pause",
            [served(worker(paused=True)), served(worker(paused=True), worker(), paused=True)],
            served(worker(paused=True), worker("left"), worker("dead"), paused=True),
        ),
        ("resume", [served(paused=True), served(worker(paused=True))], served(worker())),
        (
            "sleep",
            [served(worker("left")), served(worker("draining"), worker("left"), asleep=1), AWAY],
            served(worker("left"), worker("dead"), asleep=1),
        ),
        ("wake", [served(worker(), asleep=1), served(worker("left")), served(worker("starting"))], served(worker())),
    ],
)
def test_an_order_is_over_when_all_workers_have_followed(
    operator: Operator, capsys: pytest.CaptureFixture[str], words: str, not_yet: list[Any], at_last: dict[str, Any]
) -> None:
    operator.looks = [*not_yet, at_last]
    assert twinpool(*words.split()) == 0
    assert operator.seconds == pytest.approx(POLL_S * len(not_yet))
    for number, found in enumerate(not_yet):
        operator.looks, operator.seconds, operator.ordered = [found], 0.0, []
        assert twinpool(*words.split(), "--timeout", "5") == 1, number
        assert "not through after 5 s; it goes on" in capsys.readouterr().err
        assert 5.0 <= operator.seconds <= 5.0 + POLL_S


def test_a_change_that_is_given_up_is_told_and_one_before_it_is_not(
    operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.before = served(tried=3, failed="an earlier one")
    operator.looks = [operator.before, served(tried=4, failed="w can't take them")]
    assert twinpool("weights", "update", "/w") == 1
    assert "the weights stay as they are: w can't take them" in capsys.readouterr().err
    operator.looks, operator.ordered = [served(tried=4, failed="w can't take them")], []
    assert twinpool("flush") == 0, "it isn't the flush's"


def test_states_are_told_in_words(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    for told, words in (
        (served(), "serving  weights v1  the checkpoint"),
        (served(paused=True), "paused  weights v1"),
        (served(paused=True, asleep=2), "asleep (level 2)  weights v1"),
        (served(pending={"path": "/w"}), "being prepared: /w"),
        (served(failed="no room"), "the latest change was given up: no room"),
        (served(worker(prepared=True)), "w  ready  v1 prepared\n"),
        (served(worker(paused=True)), "w  ready  v1 paused\n"),
        (served(weights={"path": "/w"}), "serving  weights v1  /w"),
    ):
        operator.before = told
        assert twinpool("weights", "status") == 0
        assert words in capsys.readouterr().out
        assert twinpool("weights", "status", "--json") == 0
        assert json.loads(capsys.readouterr().out) == told
    assert (operator.ordered, set(operator.changes)) == ([], {False})


@pytest.mark.parametrize(
    ("words", "order", "code"),
    [
        ("load mine /a", ("load", {"lora_name": "mine", "lora_path": "/a", "load_inplace": False}), 0),
        ("load mine /a --replace", ("load", {"lora_name": "mine", "lora_path": "/a", "load_inplace": True}), 0),
        ("unload mine", ("unload", {"lora_name": "mine"}), 0),
        ("load mine", None, 2),
        ("unload mine /a", None, 2),
        ("unload", None, 2),
        ("list", None, 0),
    ],
)
def test_adapters_are_loaded_dropped_and_listed(
    operator: Operator, capsys: pytest.CaptureFixture[str], words: str, order: Any, code: int
) -> None:
    assert twinpool("adapters", *words.split()) == code
    assert operator.ordered == ([(f"/v1/{order[0]}_lora_adapter", order[1])] if order else [])
    told = capsys.readouterr().out
    if words == "list":
        assert told == "mine  dddddddddddd  /a  in memory of 2 workers\n"
    elif order:
        assert told == f"mine is {'served' if order[0] == 'load' else 'served no more'}\n"


def test_what_the_controller_refuses_is_told(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    operator.before = CommandRefused("the cluster sleeps")
    assert twinpool("flush") == 1
    assert "the cluster sleeps" in capsys.readouterr().err
    assert twinpool("weights", "update") == 2
    assert not operator.ordered


# ---------------------------------------------------------------- weights that are pushed


class Router(BaseHTTPRequestHandler):
    """A router that takes all that is pushed."""

    asked: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []
    """The path, the headers and the body of each request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def push(tensors: dict[str, torch.Tensor], path: str = "", **options: Any) -> tuple[Any, Any, bytes]:
    """What a router is asked: the parts of the URL, the headers and the body."""
    Router.asked.clear()
    with TCPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        push_weights(f"http://127.0.0.1:{server.server_address[1]}{path}", tensors, **options)
        thread.join()
    ((url, headers, body),) = Router.asked
    return urlsplit(url), headers, body


def pushed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a router gets of these tensors."""
    told: dict[str, torch.Tensor] = load(push(tensors)[-1])
    return told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {"wait": True}),
        ({"version": "v1", "partial": True}, {"wait": True, "version": "v1", "partial": True}),
        ({"wait": False, "wait_s": 0.0}, {"wait": False, "wait_s": 0.0}),
        ({"rolling": True, "wait_s": 2.5}, {"wait": True, "rolling": True, "wait_s": 2.5}),
    ],
)
@pytest.mark.parametrize(("model", "key"), [("", ""), ("a/b c", "secret")])
def test_a_push_says_what_it_was_told_to_over_http_as_by_shared_memory(
    options: dict[str, Any], said: dict[str, Any], model: str, key: str
) -> None:
    tensors = {"a": torch.arange(270_000, dtype=torch.float32), "b": torch.tensor(7.0).bfloat16()}
    more = {**options, "model": model, "api_key": key}
    url, headers, body = push(tensors, path="/pool/v1/", **more)
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    assert (url.path, headers["content-digest"]) == ("/pool/v1/weights/push", f"sha-256=:{digest}:")
    words = {name: json.dumps(value).strip('"') for name, value in said.items()}
    assert dict(parse_qsl(url.query)) == words | ({"model": model} if model else {})
    assert all(torch.equal(one, tensors[name]) for name, one in load(body).items())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        shared, others, order = push(tensors, path="/pool/v1/", root=root, **more)
        (folder,) = Path(root).iterdir()
        assert (folder / "model.safetensors").read_bytes() == body
    assert (shared.path, dict(parse_qsl(shared.query))) == ("/pool/v1/weights", {"model": model} if model else {})
    assert json.loads(order) == {"path": str(folder), **said}
    for told in (headers, others):
        assert told.get("authorization") == (f"Bearer {key}" if key else None)


def test_of_several_names_of_one_tensor_the_first_is_pushed() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    told = pushed({"embedding": weight, "head": weight, "again": weight.view(3, 4)})
    assert list(told) == ["embedding"]
    assert torch.equal(told["embedding"], weight)


@pytest.mark.parametrize("name", ["first rows", "whole in another shape", "turned", "other numbers", "empty"])
def test_tensors_that_begin_at_one_address_and_are_others_are_all_pushed(name: str) -> None:
    """An embedding that is padded, and its first rows; a fused weight and its first part."""
    weight = torch.arange(16, dtype=torch.int32).reshape(4, 4)
    other = {
        "first rows": weight[:3],
        "whole in another shape": weight.view(2, 8),
        "turned": weight.T,
        "other numbers": weight.view(torch.float32),
        "empty": weight[:0],
    }[name]
    for tensors in ({"a": weight, "b": other}, {"a": other, "b": weight}):
        told = pushed(tensors)
        assert {key: (one.dtype, one.tolist()) for key, one in told.items()} == {
            key: (one.dtype, one.tolist()) for key, one in tensors.items()
        }
