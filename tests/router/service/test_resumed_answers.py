"""Requests with a key at one router: what its headers may say, whose an answer is, and who has it; nothing is left."""

from __future__ import annotations

import inspect
import json
import secrets
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.fake_worker import FakeWorker, expected
from tests.router.http_server import Server
from tests.support.resuming_clients import ids_of, never, read
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Attached, KeptAnswer
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.router.core.answer_lookups import FoundAnswer
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.request_headers import MAX_KEY_CHARS, MAX_RESUMED_CHOICES, ResumeHeaders, SeenEvents
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.service.idempotency_keys import AnswerClaim, KeyedRequest, identity_of, usable
from twinpool.router.state.prefix_hashes import NO_HASHES, prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.ttft_prediction import TenantWeight
from twinpool.router.tokenizer_pool.prepare_request import PreparedPrompt

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 20, "return_token_ids": True}
STREAM = {**BODY, "stream": True}
PATH = "/v1/completions"


def keyed(key: str, last_id: str = "") -> dict[str, str]:
    return {"Idempotency-Key": key, **({"Last-Event-ID": last_id} if last_id else {})}


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (keyed("a b"), "visible ASCII"),
        (keyed("k" * (MAX_KEY_CHARS + 1)), "1 to 255"),
        ({"Last-Event-ID": "1-1"}, "needs the Idempotency-Key"),
        (keyed("k", "seven"), "must be the id of an event"),
        (keyed("k", "1-" + "9" * 10), "must be the id of an event"),
        (keyed("k", "1-2.3"), "must be the id of an event"),
    ],
)
def test_bad_headers_are_refused_by_name(server: Server, headers: dict[str, str], says: str) -> None:
    refused = server.post(PATH, STREAM, **headers)
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]


def test_last_event_id_is_for_streams_and_a_stream_has_so_many_choices(server: Server) -> None:
    assert server.post(PATH, BODY, **keyed("k", "1-1")).status_code == 400
    many = server.post(PATH, {**STREAM, "prompt": ["a", "b"], "n": MAX_RESUMED_CHOICES // 2 + 1}, **keyed("k"))
    assert many.status_code == 400
    assert "choices" in many.json()["error"]["message"]


def test_an_answer_of_which_nothing_is_kept_is_the_same_again(server: Server) -> None:
    """Also without a seed, and the rest of it begins behind what the client has."""
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "stream": True, "return_token_ids": True}
    whole = read(server.url, PATH, body, keyed("again"), never).whole
    cut = ids_of(whole)[7]
    rest = read(server.url, PATH, body, keyed("again", cut), never).whole
    assert b"".join(whole[:8] + rest) == b"".join(whole)
    other = read(server.url, PATH, body, keyed("other"), never).whole
    assert [e.split(b'"choices"')[1] for e in whole[:5]] != [e.split(b'"choices"')[1] for e in other[:5]]


def test_every_event_has_one_token_and_its_own_id(server: Server) -> None:
    """However workers group tokens: here everything comes at once, when the workers go on."""
    server.pause("decode")
    threading.Timer(0.05, server.resume).start()
    whole = read(server.url, PATH, STREAM, keyed("ids"), never).whole
    numbers = [int(one.split("-")[1]) for one in ids_of(whole)]
    assert numbers == list(range(1, len(whole) + 1))
    told = [json.loads(e.split(b"data: ")[1]) for e in whole if b"token_ids" in e]
    assert [len(e["choices"][0]["token_ids"]) for e in told][:20] == [1] * 20


def kept(server: Server, count: int, **changes: Any) -> tuple[KeptAnswer, list[int]]:
    """An answer of which `count` tokens are kept, and the whole answer."""
    answer = expected(BODY["prompt"], SamplingParams(20, seed=1))
    fields: dict[str, Any] = {
        "request_id": RequestId("kept-0"), "attempt": 0, "index": 0, "created": 7, "prompt_len": 3, "max_tokens": 20,
        "left_s": 60.0, "tokens": tuple(answer[:count]), "cached_tokens": 2, **changes,
    }  # fmt: skip
    return KeptAnswer(**fields), answer


def send(client: socket.socket, key: str) -> None:
    """Ask, and read nothing."""
    body = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)


def ask_and_leave(server: Server, key: str) -> FakeWorker:
    """A client asks and is gone before `decode-1` has answered, which it hasn't done yet; returns that worker."""
    worker = server.cluster["decode-1"]
    worker.attached = lambda ask: None
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        send(client, key)
        server.wait_until(lambda: bool(worker.asked))
    server.wait_until(lambda: server.service.admission.booked == 0)
    return worker


@pytest.mark.parametrize("reason", ["length", ""], ids=["and is told so", "by its tokens"])
def test_an_answer_that_has_ended_comes_from_where_it_is_kept(server: Server, reason: str) -> None:
    one, answer = kept(server, 20, reason=reason)
    server.cluster["decode-1"].attached = lambda ask: Attached(ask.request_id, 0, answers=(one,))
    told = server.post(PATH, BODY, **keyed(f"ended {reason}".strip().replace(" ", "-"))).json()
    assert told["choices"][0]["token_ids"] == answer
    assert told["created"] == 7
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert not [s for w in server.cluster.workers.values() for s in w.submits], "nobody computes it"


def test_an_answer_that_was_cut_goes_on_from_its_tokens(server: Server) -> None:
    """Its first token came at another time, and counts in no latency here."""
    one, answer = kept(server, 9, attempt=4)
    server.cluster["decode-0"].attached = lambda ask: Attached(ask.request_id, 0, answers=(one,))
    tally = server.service.metrics.tally
    first_tokens, gaps = sum(tally.ttft.counts), sum(tally.itl.counts)
    told = server.post(PATH, BODY, **keyed("cut")).json()
    assert (sum(tally.ttft.counts) - first_tokens, sum(tally.itl.counts) - gaps) == (0, 11)
    assert told["choices"][0]["token_ids"] == answer
    submits = [s for w in server.cluster.workers.values() for s in w.submits]
    assert {(s.attempt, s.tokens[3:]) for s in submits} == {(5, tuple(answer[:9]))}
    assert all(s.name is not None and s.name.created == 7 and s.name.cached_tokens == 2 for s in submits)


def test_an_answer_whose_stop_string_came_while_its_client_was_away_is_ended_and_kept(server: Server) -> None:
    one, answer = kept(server, 9, running=True, started=True)
    worker = server.cluster["decode-0"]
    worker.attached = lambda ask: Attached(ask.request_id, 0, answers=(one,))
    stop = server.service.model_tokenizer.decode([answer[4]])
    told = server.post(PATH, {**BODY, "stop": [stop]}, **keyed("stopped")).json()["choices"][0]
    assert (told["finish_reason"], told["stop_reason"]) == ("stop", stop)
    server.wait_until(lambda: [(c.request_id, c.keep) for c in worker.cancels] == [("kept-0", True)])
    assert server.call(lambda: server.service.core.lookups.held) == 0


def test_a_running_answer_that_nobody_waits_for_any_more_is_left_to_its_worker(server: Server) -> None:
    """The client leaves while its answer is looked for."""
    one, _ = kept(server, 9, running=True, started=True)
    server.cluster["decode-0"].attached = lambda ask: Attached(ask.request_id, 0, answers=())
    worker = ask_and_leave(server, "left")
    answered = Attached(worker.asked[0].request_id, 0, answers=(one,))
    server.call(lambda: worker.sessions[0].on_events([answered]))
    server.wait_until(lambda: [d.request_id for d in worker.detached] == ["kept-0"])


@pytest.mark.parametrize("changes", [{"prompt_len": 4}, {"index": 1}], ids=["another prompt", "another choice"])
def test_a_running_answer_that_does_not_fit_its_request_is_left_to_its_worker_and_begun_anew(
    server: Server, changes: dict[str, Any]
) -> None:
    one, answer = kept(server, 9, running=True, started=True)
    worker = server.cluster["decode-0"]
    worker.attached = lambda ask: Attached(ask.request_id, 0, answers=(replace(one, **changes),))
    told = server.post(PATH, BODY, **keyed("another")).json()
    assert told["choices"][0]["token_ids"] == answer
    assert server.call(lambda: server.service.core.lookups.held) == 0
    server.wait_until(lambda: [d.request_id for d in worker.detached] == ["kept-0"])


def test_found_choices_are_left_to_their_workers_where_one_of_them_can_not_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = kept(server, 9, running=True, started=True)
    found = tuple(replace(one, index=number, request_id=RequestId(f"kept-{number}")) for number in range(3))
    worker, catch_up = server.cluster["decode-0"], server.service.answers.catch_up
    worker.attached = lambda ask: Attached(ask.request_id, 0, answers=found)

    def fails(stream: ResponseStream, choice: ChoiceOutput, answer: FoundAnswer) -> None:
        if choice.index == 1:
            raise ValueError("a bug")
        catch_up(stream, choice, answer)

    monkeypatch.setattr(server.service.answers, "catch_up", fails)
    assert server.post(PATH, {**BODY, "n": 3}, **keyed("three")).status_code == 500
    assert server.call(lambda: server.service.core.lookups.held) == 0
    server.wait_until(lambda: sorted(d.request_id for d in worker.detached) == ["kept-0", "kept-1", "kept-2"])


def test_an_answer_that_another_router_has_goes_to_the_client_that_waits_here(server: Server) -> None:
    one, answer = kept(server, 20, reason="length")
    asked: list[int | None] = []

    def contested(ask: Attach) -> Attached:
        asked.append(ask.seen)
        return Attached(ask.request_id, 0, answers=(one,)) if ask.seen else Attached(ask.request_id, 0, contested=3)

    server.cluster["decode-1"].attached = contested
    told = server.post(PATH, BODY, **keyed("contested")).json()
    assert told["choices"][0]["token_ids"] == answer
    assert asked == [0, 3]


def test_an_answer_that_another_router_has_is_left_there_when_the_client_has_gone(server: Server) -> None:
    worker = ask_and_leave(server, "gone")
    ask = worker.asked[0].request_id
    server.call(lambda: worker.sessions[0].on_events([Attached(ask, 0, contested=5)]))
    assert [one.seen for one in worker.asked] == [0]
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        send(client, "gone")
        server.wait_until(lambda: [one.seen for one in worker.asked] == [0, 5])
    server.call(lambda: worker.sessions[0].on_events([Attached(ask, 0)]))
    server.wait_until(lambda: server.service.core.requests.in_flight == 0)


def test_a_worker_that_says_nothing_counts_as_having_nothing(server: Server) -> None:
    for name in ("decode-0", "decode-1"):
        server.cluster[name].attached = lambda ask: None
    wait_s = server.service.config.resume_wait_s
    began = time.monotonic()
    told = server.post(PATH, BODY, **keyed("silent")).json()
    assert told["choices"][0]["token_ids"] == expected(BODY["prompt"], SamplingParams(20, seed=1))
    assert time.monotonic() - began >= wait_s, "they had their time"


def test_another_body_is_refused_here_and_by_what_workers_say(server: Server) -> None:
    server.pause("decode")
    thread = threading.Thread(target=read, args=(server.url, PATH, STREAM, keyed("mine"), never))
    thread.start()
    prefills = server.cluster["prefill-0"], server.cluster["prefill-1"]
    server.wait_until(lambda: any(submit.name for worker in prefills for submit in worker.submits))
    here = server.post(PATH, {**STREAM, "max_tokens": 3}, **keyed("mine"))
    assert (here.status_code, here.json()["error"]["code"]) == (422, "idempotency_key_reused")
    server.call(lambda: setattr(server.cluster["decode-0"], "attached", lambda a: Attached(a.request_id, 0, True)))
    there = server.post(PATH, BODY, **keyed("theirs"))
    assert there.status_code == 422
    server.resume()
    thread.join(60)


def test_the_last_connection_has_a_waiting_answer_too_and_the_one_before_is_told(server: Server) -> None:
    """It is whole, of the same router, and neither is an error of the other."""
    server.pause("prefill")
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(server.post(PATH, BODY, **keyed("both")))) for _ in "12"]
    threads[0].start()
    server.wait_until(lambda: server.service.core.requests.in_flight == 1)
    threads[1].start()
    threads[0].join(60)
    server.wait_until(lambda: server.service.core.requests.in_flight == 1)
    server.resume()
    threads[1].join(60)
    assert [a.status_code for a in answers] == [409, 200]
    assert answers[0].json()["error"]["code"] == "superseded"
    assert answers[1].json()["choices"][0]["token_ids"] == expected(BODY["prompt"], SamplingParams(20, seed=1))


def test_a_client_that_leaves_leaves_its_answer_to_the_workers(server: Server) -> None:
    server.pause("decode")
    read(server.url, PATH, STREAM, keyed("leaves"), lambda events, _: True)
    workers = server.cluster.workers.values()
    server.wait_until(lambda: any(w.detached for w in workers if w.role is Role.DECODE))
    assert not any(w.cancels for w in workers)


def test_b2_hundreds_of_keys_leave_nothing(server: Server) -> None:
    for number in range(200):
        body = {**STREAM, "max_tokens": 3 + number % 5}
        key = secrets.token_hex(1 + number % 4)
        with server.client.stream("POST", PATH, json=body, headers=keyed(key)) as response:
            assert response.status_code in (200, 422)
            if number % 3:
                response.read()
    server.wait_until(lambda: not len(server.service.claims) and not server.service.core.lookups.held)


def test_an_identity_is_of_all_that_is_asked_and_of_the_secret() -> None:
    one = identity_of("", "tenant", "key", "CHAT", b"{}")
    assert one == identity_of("", "tenant", "key", "CHAT", b"{}")
    others = [
        identity_of("00ff", "tenant", "key", "CHAT", b"{}"),
        identity_of("", "tenan", "tkey", "CHAT", b"{}"),
        identity_of("", "other", "key", "CHAT", b"{}"),
    ]
    assert len({one.key, *(o.key for o in others)}) == 4, "another tenant's same key is another answer's"
    body = identity_of("", "tenant", "key", "CHAT", b"{ }")
    assert body.key == one.key
    assert body.body != one.body
    assert len({one.seed, body.seed, *(o.seed for o in others)}) == 5
    assert identity_of("", "tenant", "key", "COMPLETION", b"{}").body != one.body


def test_a_choice_of_a_request_with_a_key_is_the_same_but_for_its_name() -> None:
    """Every field of it, none of which is as it would be by default."""
    given: dict[str, Any] = {
        "now": 3.0,
        "deadline": 9.0,
        "hashes": prefix_hashes(tuple(range(640))),
        "salt": "salt",
        "priority": 2,
        "first_token_by": 4.0,
        "share": TenantWeight("acme", 7),
        "session": "talk",
        "pictures": (Picture(3, 8, 16, 2, bytes(384)),),
    }
    assert {*inspect.signature(RoutedRequest).parameters} - {"request_id", "prompt", "sampling", "name"} == given.keys()
    plain = RoutedRequest(RequestId("mine-0"), (5, 6, 7), SamplingParams(20, seed=1), **given)
    identity = identity_of("", "acme", "key", "completions", b"{}")
    named = KeyedRequest(identity, ResumeHeaders("key", None), AnswerClaim(identity, RequestId("ask"), 0), 7).named(
        0, plain
    )
    assert named.name == AnswerName(identity.key, identity.body, 0, 7)
    others = [field for field in RoutedRequest.__slots__ if field not in ("name", "journal")]
    assert {field: getattr(named, field) for field in others} == {field: getattr(plain, field) for field in others}


def test_a_choice_that_a_worker_has_kept_has_the_time_that_is_left_of_it() -> None:
    """And no first token to be late with."""
    identity = identity_of("", "acme", "key", "completions", b"{}")
    kept = KeptAnswer(RequestId("theirs-0"), 3, 0, 7, 3, 11, left_s=4.0, tokens=(8, 9))
    found = FoundAnswer((WorkerName("decode-0"), Incarnation(1)), kept, 5, "")
    claim = AnswerClaim(identity, RequestId("ask"), 0, found={0: found})
    plain = RoutedRequest(
        RequestId("mine-0"), (5, 6, 7), SamplingParams(20, seed=1), now=100.0, deadline=160.0, first_token_by=101.0
    )
    named = KeyedRequest(identity, ResumeHeaders("key", None), claim, 7).named(0, plain)
    assert (named.id, named.deadline, named.first_token_by) == ("theirs-0", 104.0, None)
    assert (named.sampling.max_tokens, named.attempt, named.last_attempt, named.emitted) == (11, 3, 5, [8, 9])


@pytest.mark.parametrize(("events", "told"), [(None, False), (0, False), (1, True)])
def test_a_choice_of_which_the_client_has_a_part_is_bound_to_the_weights_of_that_part(
    events: int | None, told: bool
) -> None:
    """Also where a worker has kept nothing of it yet but its name."""
    identity = identity_of("", "acme", "key", "completions", b"{}")
    kept = KeptAnswer(RequestId("theirs-0"), 3, 0, 7, 3, 11, left_s=4.0)
    found = FoundAnswer((WorkerName("decode-0"), Incarnation(1)), kept, 5, "")
    headers = ResumeHeaders("key", None if events is None else SeenEvents(7, (events, events)))
    claim = AnswerClaim(identity, RequestId("ask"), 0, found={0: found})
    plain = RoutedRequest(RequestId("mine-0"), (5, 6, 7), SamplingParams(20, seed=1), now=100.0, deadline=160.0)
    first, second = (KeyedRequest(identity, headers, claim, 7, 4).named(index, plain) for index in (0, 1))
    assert (first.told, first.delivered, first.drawn_again_with) == (told, told, None)
    assert (second.told, second.drawn_again_with) == (False, 4 if told else None)


def test_what_was_kept_of_another_adapter_or_another_prompt_is_not_gone_on_with() -> None:
    identity, worker = identity_of("", "acme", "key", "completions", b"{}"), (WorkerName("decode-0"), Incarnation(1))
    kept = KeptAnswer(RequestId("r"), 1, 0, 7, 3, 11, left_s=4.0, tokens=(8, 9), adapter="served")

    def fits(served: AdapterRef | None, *, choice: int = 0, tokens: int = 3) -> bool:
        claim = AnswerClaim(identity, RequestId("ask"), 0, found={choice: FoundAnswer(worker, kept, 5, "")})
        sampling = SamplingParams(20, adapter=served)
        request: Any = SimpleNamespace(choices=4, n=2, sampling=sampling)
        short, other = (PreparedPrompt((5,) * count, "", NO_HASHES) for count in (1, tokens))
        return choice in usable(claim, request, [other, short])

    ref = AdapterRef("same", "served", "/a")
    assert fits(ref)
    assert fits(ref, choice=1)
    assert not fits(ref, choice=2), "a choice of the second prompt, which is shorter"
    assert not fits(ref, choice=4), "a choice that was not asked for"
    assert not fits(ref, tokens=4)
    assert not fits(None)
    assert not fits(AdapterRef("same", "files of now", "/a"))
