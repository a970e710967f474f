"""Two requests with one key at nearly the same moment: whatever the order in which they are read, one has the answer,
the other is told, and nothing that was booked stays so."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec import structs

from tests.router.fake_worker import FakeCluster, FakeWorker, expected
from tests.router.http_server import Server, demo_spec, eventually, router_config, serving
from tests.router.stage import Stage
from twinpool.cli.credential_commands import new_key
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.key_file import TenantLimits, read_key_file, write_key_file
from twinpool.contracts.messages.kept_answers import Attach, Attached, KeptAnswer
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.openai.api_errors import Superseded
from twinpool.router.openai.request_headers import RequestHeaders, ResumeHeaders
from twinpool.router.service.idempotency_keys import AnswerClaim, AnswerClaims, AnswerIdentity
from twinpool.router.service.open_answers import ClientRequest
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.tokenizer_pool.tokenizer_pool import INLINE_BYTES
from twinpool.router.tokenizer_pool.tokenizer_process import REQUESTS, FrameKind, prepared_frame

PROMPT = [5, 6, 7] * 400
"""Of a body that a reader process reads."""
PATH = "/v1/completions"
NAMES = (f"key-{number}" for number in itertools.count())


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "seed": 1, "max_tokens": 20, "return_token_ids": True, **changes}


def hand_over(worker: FakeWorker, ask: Attach) -> Attached:
    """A worker hands what it runs under a key over to whoever asks."""
    kept = [
        KeptAnswer(
            s.request_id, s.attempt, s.name.index, s.name.created, s.prompt_len, s.sampling.max_tokens, 60.0, (), (),
            None, running=True, started=False,
        )
        for s in (leg.submit for leg in worker.legs.values())
        if s.name is not None and s.name.key == ask.key
    ]  # fmt: skip
    return Attached(ask.request_id, 0, answers=tuple(kept))


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Workers do nothing but hand over what they have."""

    def attach() -> None:
        for worker in server.cluster.workers.values():
            worker.attached = partial(hand_over, worker) if worker.role is Role.DECODE else None

    server.call(attach)
    server.pause("prefill")
    server.pause("decode")
    try:
        yield
    finally:
        server.resume()


class HeldReplies:
    """The replies of a router's readers, which come when they are let go."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server, self._held = server, list[tuple[asyncio.Future[Any], asyncio.Future[Any]]]()
        self._submit = server.service.readers.submit
        monkeypatch.setattr(server.service.readers, "submit", self._hold)

    def _hold(
        self, kind: FrameKind, raw: bytes, tenant: str = "", fetched: bytes = b""
    ) -> asyncio.Future[tuple[FrameKind, bytes]]:
        late: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._held.append((self._submit(kind, raw, tenant), late))
        return late

    def come(self, count: int) -> None:
        """Wait until so many requests wait for their replies, which readers have made."""
        self._server.wait_until(lambda: len(self._held) == count and all(made.done() for made, _ in self._held))

    def let_go(self, *numbers: int) -> None:
        """Have these replies come in one turn of the loop, in this order."""

        def work() -> None:
            for number in numbers:
                made, late = self._held[number]
                late.set_result(made.result())

        self._server.call(work)


class Asked:
    """A request on a connection of its own."""

    def __init__(self, server: Server, key: str, asked: dict[str, Any], **headers: str) -> None:
        self.answer: httpx.Response | None = None

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
                self.answer = client.post(PATH, json=asked, headers={"Idempotency-Key": key, **headers})

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def status(self) -> int:
        """Of its answer, which must come."""
        self._thread.join(60)
        assert self.answer is not None, "it hangs"
        return self.answer.status_code


def right(asked: Asked) -> bool:
    assert asked.answer is not None
    told: list[int] = asked.answer.json()["choices"][0]["token_ids"]
    return told == expected(PROMPT, SamplingParams(20, seed=1))


def in_flight(server: Server, count: int) -> None:
    server.wait_until(lambda: server.service.core.requests.in_flight == count)


@pytest.mark.parametrize("later_first", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_c6_the_later_of_two_connections_has_the_answer_whichever_is_read_first(
    server: Server, monkeypatch: pytest.MonkeyPatch, later_first: bool, apart: bool
) -> None:
    """`apart`: the second reply comes once the first one's answer has begun, else both come in one turn."""
    assert len(str(PROMPT)) > INLINE_BYTES
    replies, key = HeldReplies(server, monkeypatch), next(NAMES)
    with paused(server):
        earlier = Asked(server, key, body())
        replies.come(1)
        later = Asked(server, key, body())
        replies.come(2)
        order = (1, 0) if later_first else (0, 1)
        if apart:
            replies.let_go(order[0])
            in_flight(server, 1)
            replies.let_go(order[1])
        else:
            replies.let_go(*order)
        assert earlier.status() == 409
        in_flight(server, 1)
    assert later.status() == 200
    assert right(later)
    assert server.service.admission.booked == 0
    assert len(server.service.claims) == 0


@pytest.mark.parametrize("apart", [True, False])
def test_another_body_under_the_key_is_refused_whenever_it_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    replies, key = HeldReplies(server, monkeypatch), next(NAMES)
    with paused(server):
        one = Asked(server, key, body())
        replies.come(1)
        other = Asked(server, key, body(max_tokens=19))
        replies.come(2)
        replies.let_go(0)
        if apart:
            in_flight(server, 1)
        replies.let_go(1)
        assert other.status() == 422
    assert one.status() == 200
    assert right(one)


def test_whoever_comes_while_a_refusal_is_on_its_way_is_refused_too(server: Server) -> None:
    """A worker has another body under the key: it says so, and before the first one has heard of it a second comes."""
    key, service = next(NAMES), server.service
    worker = server.cluster["decode-1"]
    worker.attached = lambda ask: None
    first = Asked(server, key, body())
    server.wait_until(lambda: bool(worker.asked))
    ask = worker.asked.pop().request_id
    (claim,) = service.claims._claims.values()

    async def second() -> None:
        worker.sessions[0].on_events([Attached(ask, 0, other_body=True)])
        await service.claims.claim(claim.identity, service.claims.next_turn(), 1, service._act, None)

    with pytest.raises(Exception, match="another body"):
        asyncio.run_coroutine_threadsafe(second(), server.loop).result(60)
    assert first.status() == 422
    assert len(service.claims) == 0


@pytest.mark.asyncio
async def test_who_was_superseded_and_is_cancelled_before_it_hears_of_it_takes_nothing_from_who_came_later() -> None:
    """The client of the earlier connection goes in the very turn of the loop in which the later one has the claim."""
    core = Stage(1, 1).core
    claims = AnswerClaims(core, lambda stream: pytest.fail("no answer is under way"))
    identity = AnswerIdentity("key", "body", "answer", 1)
    tasks: list[asyncio.Task[AnswerClaim]] = []

    def come(act: Callable[[], None]) -> None:
        tasks.append(asyncio.create_task(claims.claim(identity, claims.next_turn(), 1, act, None)))

    def earlier_goes() -> None:
        tasks[0].cancel()

    come(lambda: None)
    await asyncio.sleep(0)
    come(earlier_goes)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    ((holder, asked),) = core.lookups.take_commands()
    assert isinstance(asked, Attach)
    core.lookups.on_event(holder, Attached(asked.request_id, 0, contested=3))
    assert core.lookups.take_commands() == [(holder, structs.replace(asked, seen=3))], "somebody waits for it"
    kept = KeptAnswer(RequestId("r"), 0, 0, 7, 3, 20, 60.0, (4, 5), (), None, running=True, started=True)
    core.lookups.on_event(holder, Attached(asked.request_id, 0, answers=(kept,)))
    (ended,) = core.lookups.take_ended()
    claims.on_ended(ended)
    assert core.lookups.take_commands() == [], "nothing is given up"
    claim = await tasks[1]
    assert [found.answer for found in claim.found.values()] == [kept]
    assert (core.lookups.held, len(claims), claims.asking) == (1, 1, 0)


@pytest.mark.asyncio
async def test_c6_the_latest_of_three_has_an_answer_that_is_looked_for_though_the_second_comes_last() -> None:
    core = Stage(1, 1).core
    claims = AnswerClaims(core, lambda stream: pytest.fail("no answer is under way"))
    identity, turns = AnswerIdentity("key", "body", "answer", 1), [claims.next_turn() for _ in range(3)]
    tasks: dict[int, asyncio.Task[AnswerClaim]] = {}
    for number in (0, 2, 1):
        tasks[number] = asyncio.create_task(claims.claim(identity, turns[number], 1, lambda: None, None))
        await asyncio.sleep(0)
    ((holder, asked),) = core.lookups.take_commands()
    core.lookups.on_event(holder, Attached(asked.request_id, 0))
    (ended,) = core.lookups.take_ended()
    claims.on_ended(ended)
    ways = await asyncio.gather(*(tasks[number] for number in range(3)), return_exceptions=True)
    assert [type(way) for way in ways] == [Superseded, Superseded, AnswerClaim]


@contextmanager
def two_at_a_time(folder: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    """A router whose one tenant may have two answers at a time, and what its requests say."""
    keys = folder / "keys.json"
    secret = new_key(keys, "acme")
    write_key_file(keys, replace(read_key_file(keys), tenants={"acme": TenantLimits(concurrent=2)}))
    config = Config(security=SecurityConfig(keys_file=str(keys)))
    with serving(FakeCluster(2, 2), config=config) as server:
        yield server, {"Authorization": f"Bearer {secret}"}
        server.at_rest()


@pytest.mark.slow
def test_a_tenant_keeps_its_places_after_such_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_at_a_time(tmp_path) as (server, who):
        for number in range(3):
            with monkeypatch.context() as patch, paused(server):
                replies, key = HeldReplies(server, patch), f"k{number}"
                earlier = Asked(server, key, body(), **who)
                replies.come(1)
                later = Asked(server, key, body(), **who)
                replies.come(2)
                replies.let_go(1)
                in_flight(server, 1)
                replies.let_go(0)
                assert earlier.status() == 409
            assert later.status() == 200
            assert server.service.admission.tenants.places == {}
        both = server.post(PATH, body(n=2), **who)
        assert both.status_code == 200, both.text


@pytest.mark.slow
def test_b2_an_answer_that_can_not_begin_gives_back_all_that_it_had_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router core fails on the second choice of two, with a key and without one."""
    with two_at_a_time(tmp_path) as (server, who):
        submit, calls = server.service.core.submit, itertools.count(1)

        def fail_each_second(request: RoutedRequest) -> None:
            if next(calls) % 2 == 0:
                raise RuntimeError("planted")
            submit(request)

        monkeypatch.setattr(server.service.core, "submit", fail_each_second)
        for key in ({}, {"Idempotency-Key": "k"}):
            assert server.post(PATH, body(n=2), **who, **key).status_code == 500
            assert (
                server.service.admission.booked,
                server.service.admission.tenants.places,
                len(server.service.claims),
            ) == (0, {}, 0)
        monkeypatch.undo()
        assert server.post(PATH, body(n=2), **who).status_code == 200


def test_choices_that_are_looked_for_have_their_places_meanwhile() -> None:
    """Two requests of two choices each and room for three: the second doesn't begin beside the first."""
    with serving(FakeCluster(2, 2), config=router_config(resume_wait_s=60.0, max_queue=3)) as server:
        worker = server.cluster["decode-1"]
        worker.attached = lambda ask: None
        first = Asked(server, next(NAMES), body(n=2))
        server.wait_until(lambda: bool(worker.asked))
        assert server.service.admission.booked == 2
        assert server.post(PATH, body(n=2), **{"Idempotency-Key": next(NAMES)}).status_code == 429
        server.call(lambda: worker.sessions[0].on_events([Attached(worker.asked[0].request_id, 0)]))
        assert first.status() == 200


def lost_holder(server: Server) -> Callable[[], object]:
    async def hold() -> None:
        task = asyncio.current_task()
        assert task is not None
        server.service.admission._opening[task] = 1

    asyncio.run_coroutine_threadsafe(hold(), server.loop).result(60)
    return server.service.admission._opening.popitem


def test_check_counts_what_is_booked_against_what_lives(server: Server) -> None:
    service = server.service
    server.pause("decode")
    running = Asked(server, next(NAMES), body())
    in_flight(server, 1)
    assert server.call(service.check) == []
    (stream, _) = next(iter(service.answers.owners.values()))
    claims: Any = service.claims._claims
    claim = claims[stream.answer_key]
    stranger = SimpleNamespace(stream=None, waiter=None, identity=claim.identity)
    accounts: Any = service.admission.tenants._accounts
    plants: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("1 choices are in flight, 2 are booked", lambda: vars(service.admission).update(choices=2),
         lambda: vars(service.admission).update(choices=1)),
        ("choices of acme", lambda: accounts.update(acme=SimpleNamespace(in_flight=1)), lambda: accounts.pop("acme")),
        ("its claim is another's", lambda: claims.update({stream.answer_key: stranger}),
         lambda: claims.update({stream.answer_key: claim})),
    ]  # fmt: skip
    for says, plant, undo in plants:
        server.call(plant)
        found = server.call(service.check)
        server.call(undo)
        assert any(says in line for line in found), (says, found)
    undo = lost_holder(server)
    assert any("still hold places" in line for line in server.call(service.check))
    server.call(undo)
    assert server.call(service.check) == []
    server.resume()
    assert running.status() == 200


@pytest.mark.slow
def test_whoever_is_read_or_looked_for_while_the_router_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing begins any more that nobody would end."""
    with serving(FakeCluster(1, 1), config=router_config(resume_wait_s=60.0)) as server:
        replies = HeldReplies(server, monkeypatch)
        server.cluster["decode-0"].attached = lambda ask: None
        waits = Asked(server, next(NAMES), body())
        replies.come(1)
        replies.let_go(0)
        server.wait_until(lambda: server.service.claims.asking == 1)
        read = Asked(server, next(NAMES), body())
        replies.come(2)
        closed = asyncio.run_coroutine_threadsafe(server.service.close(), server.loop)
        replies.let_go(1)
        assert waits.status() == read.status() == 503
        closed.result(60)
        assert server.post(PATH, {"prompt": [5]}).status_code == 503
        assert server.service.answers.owners == {}


class Storm:
    """Connections with few keys and bodies that come, are read, are cut and end in the order of a seed, at a router
    whose workers move as the seed says; all its books are right after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = FakeCluster(1, 2)
        config = router_config(resume_wait_s=0.002, max_queue=12)
        self.service = RouterService(demo_spec(), config, self.cluster)
        self.late: list[tuple[asyncio.Future[Any], FrameKind, bytes]] = []
        self.service.readers.submit = self._hold  # type: ignore[method-assign]
        self.gone: dict[asyncio.Task[str], list[Callable[[], object]]] = {}
        self.told: Counter[str] = Counter()

    def _hold(
        self, kind: FrameKind, raw: bytes, tenant: str = "", fetched: bytes = b""
    ) -> asyncio.Future[tuple[FrameKind, bytes]]:
        late: asyncio.Future[tuple[FrameKind, bytes]] = asyncio.get_running_loop().create_future()
        self.late.append((late, kind, raw))
        return late

    async def run(self, steps: int) -> None:
        for worker in self.cluster.workers.values():
            worker.pause()
            if worker.role is Role.DECODE:
                worker.attached = partial(hand_over, worker)
        await self.service.start()
        await eventually(lambda: len(list(self.service.core.workers)) == 3 and self.service.worker_links.missing == 0)
        actions = [self._come] * 3 + [self._read] * 3 + [self._move, self._leave]
        for _ in range(steps):
            self.rng.choice(actions)()
            for _ in range(self.rng.choice((0, 0, 1, 3))):
                await asyncio.sleep(0)
            assert self.service.check() == []
        for worker in self.cluster.workers.values():
            worker.resume()
        while any(not task.done() for task in self.gone):
            self._read()
            await asyncio.wait([task for task in self.gone if not task.done()], timeout=0.001)
        self.told.update(task.result() for task in self.gone)
        await eventually(lambda: not self.service.core.requests.in_flight)
        assert self.service.check() == []
        assert (self.service.admission.booked, len(self.service.claims)) == (0, 0)
        await self.service.close()

    def _come(self) -> None:
        calls: list[Callable[[], object]] = []
        key = self.rng.choice("ab")
        length = 3 if self.rng.random() < 0.95 else 4
        raw = json.dumps({"prompt": PROMPT, "seed": 1, "max_tokens": length, "n": 1 + (key == "b")}).encode()
        resume = ResumeHeaders(key, None) if self.rng.random() < 0.9 else None
        self.gone[asyncio.create_task(self._ask(raw, resume, calls))] = calls

    async def _ask(self, raw: bytes, key: ResumeHeaders | None, calls: list[Callable[[], object]]) -> str:
        try:
            stream = await self.service.open(
                ClientRequest(FrameKind.COMPLETION, raw, "client", headers=RequestHeaders(key), on_gone=calls.append)
            )
        except TwinpoolError as error:
            return type(error).__name__
        left: list[bool] = []

        def leave() -> None:
            left.append(True)
            self.service.abandon(stream)
            stream.fail("the client left")

        calls.append(leave)
        async with asyncio.timeout(60):
            await stream.ended()
        self.service.abandon(stream)
        if stream.failed is not None:
            return "left" if left else str(stream.failed.error)
        for choice in stream.choices:
            prompt, sampling = choice.request.prompt, choice.request.sampling
            assert list(choice.tokens) == expected(prompt, sampling), "an answer of two"
        return "answered"

    def _read(self) -> None:
        """A reader has read one of the bodies."""
        if self.late:
            late, kind, raw = self.late.pop(self.rng.randrange(len(self.late)))
            if not late.done():
                late.set_result((FrameKind.PREPARED, prepared_frame(REQUESTS[kind](self.service.intake, raw, ""))))

    def _move(self) -> None:
        self.rng.choice(list(self.cluster.workers.values())).step()

    def _leave(self) -> None:
        """A client goes."""
        waiting = [task for task in self.gone if not task.done()]
        if waiting and self.rng.random() < 0.5:
            for call in self.gone[self.rng.choice(waiting)]:
                call()


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(12)]


@pytest.mark.parametrize("seed", SEEDS)
def test_b2_equal_keys_in_any_order_leave_nothing_booked_and_hang_nobody(seed: int) -> None:
    storm = Storm(seed)
    asyncio.run(storm.run(120 if seed else 40))
    assert storm.told["answered"]
    assert not storm.told["RuntimeError"]
