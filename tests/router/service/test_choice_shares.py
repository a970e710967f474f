"""Requests of many choices: they are placed a share a turn, and nobody waits for all of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.router.http_server import Server
from twinpool.router.service.open_answers import SHARE, ClientRequest
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind

PATH = "/v1/completions"
MANY = 6 * SHARE + 1
LARGE = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 3, "n": MANY}


class Turns:
    """In which turn of the router's loop each choice is placed."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.placed: list[tuple[int, str]] = []
        self.number, self._server = 0, server
        self.during: dict[int, Any] = {}
        """What is done in a turn of the loop, counted from the first choice on."""
        self._submit = server.service.core.submit
        monkeypatch.setattr(server.service.core, "submit", self._note)

    def _note(self, request: RoutedRequest) -> None:
        if not self.placed:
            asyncio.get_running_loop().call_soon(self._next)
        self.placed.append((self.number, request.id.rpartition("-")[0]))
        self._submit(request)

    def _next(self) -> None:
        self.number += 1
        self.during.pop(self.number, lambda: None)()
        if self.number < 3 * MANY:
            asyncio.get_running_loop().call_soon(self._next)


@pytest.mark.parametrize("count", [1, SHARE + 1])
def test_d7_a_large_request_is_placed_in_shares_and_a_smaller_one_between_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    turns, found = Turns(server, monkeypatch), list[str]()
    service = server.service
    small: list[asyncio.Future[Any]] = []

    def ask() -> None:
        raw = b'{"prompt": [8, 9], "max_tokens": 2, "seed": 2, "n": %d}' % count
        task = asyncio.ensure_future(service.open(ClientRequest(FrameKind.COMPLETION, raw, "small")))
        small.append(task)

    turns.during = {2: lambda: found.extend(service.check()), 3: ask}
    answer = server.post(PATH, LARGE)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == MANY
    assert found == [], "choices that wait to be placed are booked"
    large = Counter(turn for turn, stream in turns.placed if stream == turns.placed[0][1])
    assert max(large.values()) == SHARE
    assert len(large) == -(-MANY // SHARE)
    smaller = [turn for turn, stream in turns.placed if stream != turns.placed[0][1]]
    assert len(smaller) == count
    assert max(smaller) < max(large), "it waited for all of the large one"
    server.wait_until(lambda: service.core.requests.in_flight == 0)


def test_choices_whose_client_has_left_are_never_placed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, service = Turns(server, monkeypatch), server.service

    def leave() -> None:
        for stream, _ in list(service.answers.owners.values()):
            service.abandon(stream)
            stream.fail("the client left")

    turns.during = {2: leave}
    server.pause("prefill")
    answer = server.post(PATH, LARGE)
    server.resume()
    assert answer.status_code != 200
    assert len(turns.placed) < MANY
    assert server.call(lambda: list(service.answers.waiting())) == []
    assert service.admission.booked == 0


def test_an_answer_of_which_a_later_choice_can_not_be_placed_ends_whole(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = server.service.core.submit, itertools.count()

    def fail(request: RoutedRequest) -> None:
        if next(calls) == SHARE + 2:
            raise RuntimeError("planted")
        submit(request)

    monkeypatch.setattr(server.service.core, "submit", fail)
    server.pause("prefill")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(PATH, LARGE)))
    thread.start()
    thread.join(60)
    server.resume()
    assert answers[0].status_code >= 500
    assert "place a choice" in answers[0].text
    assert server.service.admission.booked == 0
