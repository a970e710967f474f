"""Prefill and decode together, stepped by hand. The `pair` context checks both for leaks at its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Oracle, compare
from tests.support.worker_pair import SESSION, Answer, Pair, pair
from tests.support.worker_parts import manager_of, receiver_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.router_commands import Audit, Cancel, PeerRef, Submit
from twinpool.contracts.messages.worker_events import Audited, Done
from twinpool.contracts.sampling_params import SamplingParams

PLANES = ["local", "shm", "zmq", "nixl", "staged"]
VOCAB = 300


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **options)


def expect_equal(oracle: Oracle, prompt: Sequence[int], answer: Answer) -> None:
    verdict = compare(oracle, prompt, answer.list)
    assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_greedy_answers_are_the_oracles(model: Path, oracle: Oracle, plane: str, page_tokens: int) -> None:
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "cache": {"page_tokens": page_tokens}}
    with pair(model, tokens=4096, prefill={"chunk_tokens": 96}, **sections) as both:
        asked = prompts(1, 1, 2, 15, 16, 17, 64, 65, 96, 97, 400)
        answers = both.run(*[both.submit(p, greedy(12)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
            received = answer.progress[Role.DECODE].transfer_bytes
            assert answer.progress[Role.DECODE].cached_tokens == 0, "the prompts have nothing in common"
            assert received == -(-len(prompt) // page_tokens) * 512 * page_tokens
            assert answer.progress[Role.DECODE].computed_tokens == 0
            assert answer.progress[Role.PREFILL].computed_tokens == len(prompt)


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once_and_the_answer_is_the_same(model: Path, oracle: Oracle) -> None:
    (prefix, *tails) = prompts(2, 200, 3, 40, 1)
    tails.append(tails[1])
    with pair(model) as both:
        for number, tail in enumerate(tails):
            (answer,) = both.run(both.submit(prefix + tail, greedy(8)))
            expect_equal(oracle, prefix + tail, answer)
            assert answer.progress[Role.PREFILL].cached_tokens == (0, 192, 192, 224)[number]
        (answer,) = both.run(both.submit(prefix + tails[0], greedy(8), salt="other"))
        assert answer.progress[Role.PREFILL].cached_tokens == 0
        assert both.prefill.status().counters["prompt_tokens_computed"] == 203 + 48 + 9 + 16 + 203
        assert both.decode.status().counters["prompt_tokens_computed"] == 0


def test_a_prefix_that_comes_many_times_at_once_is_computed_once(model: Path, oracle: Oracle) -> None:
    (prefix, *tails) = prompts(26, 160, 5, 20, 33)
    asked = [prefix, prefix, *(prefix + tail for tail in tails)]
    with pair(model, prefill={"chunk_tokens": 64}) as both:
        answers = both.run(*[both.submit(p, greedy(6)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)
        assert [a.progress[Role.PREFILL].cached_tokens for a in answers] == [0, 144, 160, 160, 160]
        assert both.prefill.status().counters["prompt_tokens_computed"] == 160 + 16 + 5 + 20 + 33


def test_c11_nobody_waits_for_a_twin_that_has_no_grant(model: Path, oracle: Oracle) -> None:
    """The earlier twin is computed and holds its pages, but decode waits for the later one."""
    (prompt,) = prompts(27, 100)
    with pair(model, tokens=160, prefill={"cache": {"device_tokens": 160}, "chunk_tokens": 16}) as both:
        early = both.submit(prompt, greedy(5), legs=(Role.PREFILL,))
        both.step(Role.PREFILL)
        late = both.submit(prompt, greedy(5))
        (answer,) = both.run(late)
        expect_equal(oracle, prompt, answer)
        both.cancel(early)


def test_the_first_token_that_ends_a_request_ends_it_everywhere(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(3, 30)
    first = oracle.generate(prompt, 1)[0]
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompt, greedy(10, stop_token_ids=(first,))))
        assert answer.list == [first]
        assert answer.done is not None
        assert (answer.done.reason, answer.done.stop_token) == ("stop", first)


def test_a_later_stop_token_ends_the_answer(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(3, 30)
    want = oracle.generate(prompt, 10)
    stop = want[4]
    end = want.index(stop) + 1
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompt, greedy(10, stop_token_ids=(stop,))))
        assert answer.list == want[:end]
        assert answer.done is not None
        assert answer.done.stop_token == stop


def test_one_token_needs_no_decode_worker(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(4, 20)
    with pair(model) as both:
        (answer,) = both.run(both.submit(prompt, greedy(1)))
        assert answer.list == oracle.generate(prompt, 1)
        assert answer.done is not None
        assert answer.done.reason == "length"
        assert Role.DECODE not in answer.progress


def test_d6_log_probs_and_prompt_scores_come_through_the_split(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(5, 90)
    with pair(model, prefill={"chunk_tokens": 32}) as both:
        (answer,) = both.run(both.submit(prompt, greedy(6, logprobs=3, prompt_logprobs=2)))
        tokens = [*prompt, *answer.list]
        want = oracle.logits(tokens).log_softmax(-1)
        assert [s.token for s in answer.scores] == prompt[1:]
        for position, score in enumerate(answer.scores, start=1):
            assert score.logprob == pytest.approx(float(want[position - 1, tokens[position]]), abs=1e-3)
            assert len(score.top) == 2
        assert sorted(answer.logprobs) == list(range(90, 96))
        for position, score in answer.logprobs.items():
            assert score.token == tokens[position]
            assert score.logprob == pytest.approx(float(want[position - 1].max()), abs=1e-3)
            assert [t for t, _ in score.top] == want[position - 1].topk(3).indices.tolist()


@pytest.mark.slow
def test_d5_a_replay_from_any_emitted_token_continues_the_same_answer(model: Path) -> None:
    (prompt,) = prompts(6, 50)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=99, repetition_penalty=1.2, frequency_penalty=0.3)
    with pair(model) as both:
        whole = both.run(both.submit(prompt, sampling))[0].list
        for cut in range(1, 12):
            answer = both.run(both.submit(prompt, sampling, emitted=whole[:cut]))[0]
            assert answer.list == whole[cut:]
            assert min(answer.tokens) == 50 + cut


def test_a_replay_that_lacks_one_token_ends_at_prefill_though_it_has_a_decode_worker(model: Path) -> None:
    peer = PeerRef(WorkerName("decode-0"), Incarnation(1), "")
    with pair(model) as both:
        replay = Submit(RequestId("r"), 0, RoomId("r"), (1, 2, 3, 4, 5), 2, SamplingParams(4, temperature=0.0), peer)
        both.prefill.handle(SESSION, replay)
        said = [event for _ in range(20) for _, event in both.prefill.step()]
        ends = [(event.reason, event.stop_token) for event in said if isinstance(event, Done)]
        assert ends == [("length", None)]


@pytest.mark.slow
def test_sampled_answers_are_the_same_alone_in_a_batch_and_with_other_pools(model: Path) -> None:
    asked = prompts(7, *range(3, 120, 9))
    draws = [SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, top_k=50, seed=i) for i in range(len(asked))]
    with pair(model, cache={"page_tokens": 16}) as both:
        alone = [both.run(both.submit(p, s))[0].list for p, s in zip(asked, draws, strict=True)]
    with pair(model, tokens=600, cache={"page_tokens": 4}, prefill={"chunk_tokens": 37}) as both:
        batch = both.run(*[both.submit(p, s) for p, s in zip(asked, draws, strict=True)])
        assert [a.list for a in batch] == alone


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_b2_requests_cancelled_at_random_moments_leave_nothing_behind(model: Path, oracle: Oracle, plane: str) -> None:
    rng = random.Random(11)
    kept = prompts(8, 40, 90)
    with pair(model, tokens=1024, transfer={"plane": plane}, prefill={"chunk_tokens": 32}) as both:
        sure = [both.submit(p, greedy(30)) for p in kept]
        for prompt in prompts(9, *[rng.randrange(1, 150) for _ in range(100)]):
            request = both.submit(prompt, greedy(rng.randrange(1, 20)))
            for _ in range(rng.randrange(8)):
                both.step()
            legs = [Role.PREFILL, Role.DECODE]
            rng.shuffle(legs)
            for leg in legs[: rng.randrange(1, 3)]:
                both.cancel(request, (leg,))
                for _ in range(rng.randrange(3)):
                    both.step()
            both.cancel(request)
        for prompt, answer in zip(kept, both.run(*sure), strict=True):
            expect_equal(oracle, prompt, answer)


@pytest.mark.parametrize("lost", [False, True])
def test_a10_what_prefill_gives_up_decode_gives_up_and_its_router_may_try_again(model: Path, lost: bool) -> None:
    """`lost`: prefill has lost the router's connection, of which the router may hear later than decode does."""
    (prompt,) = prompts(10, 120)
    with pair(model, prefill={"chunk_tokens": 16}) as both:
        request = both.submit(prompt, greedy(5))
        for _ in range(4):
            both.step()
        if lost:
            both.prefill.drop_session(SESSION)
        else:
            both.cancel(request, (Role.PREFILL,))
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.CANCELLED
        assert answer.done.error.retryable


@pytest.mark.parametrize("plane", PLANES)
def test_a9_a_flipped_byte_is_found_counted_and_not_decoded(model: Path, oracle: Oracle, plane: str) -> None:
    (prompt,) = prompts(12, 60)
    with pair(model, transfer={"plane": plane}, faults={"corrupt_page": 1}) as both:
        (answer,) = both.run(both.submit(prompt, greedy(8)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DAMAGED
        assert answer.done.blame == "prefill-0"
        assert len(answer.tokens) <= 1
        assert both.decode.status().counters["pages_damaged"] == 1
        (again,) = both.run(both.submit(prompt, greedy(8)))
        expect_equal(oracle, prompt, again)


def test_a9_a_page_that_rotted_in_the_tree_is_found_and_computed_again(model: Path, oracle: Oracle) -> None:
    (prompt,) = prompts(25, 70)
    with pair(model, decode={"cache": {"prefix_reuse": False}}) as both:
        both.run(both.submit(prompt, greedy(4)))
        manager_of(both.prefill).pools.gates["full"].layer(0)["v"][2, 3, 0, 0] += 1.0
        (answer,) = both.run(both.submit(prompt, greedy(4)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DAMAGED
        while not both.prefill.status().counters["pages_invalidated"]:
            both.step()
        (again,) = both.run(both.submit(prompt, greedy(8)))
        expect_equal(oracle, prompt, again)
        assert again.progress[Role.PREFILL].cached_tokens == 0
        (shared,) = both.run(both.submit(prompt, greedy(8)))
        expect_equal(oracle, prompt, shared)
        assert shared.progress[Role.PREFILL].cached_tokens == 64


def test_verification_can_be_switched_off_and_then_the_flipped_byte_is_decoded(model: Path) -> None:
    """The control for the test above: it is the tags that find the byte."""
    (prompt,) = prompts(12, 60)
    sections: dict[str, Any] = {"cache": {"verify": False}, "faults": {"corrupt_page": 1}}
    with pair(model, **sections) as both:
        (answer,) = both.run(both.submit(prompt, greedy(8)))
        assert answer.done is not None
        assert answer.done.error is None


def test_c9_rooms_are_used_once(model: Path) -> None:
    (prompt,) = prompts(13, 20)
    with pair(model) as both:
        both.run(both.submit(prompt, greedy(3)))
        for worker, peer in ((both.prefill, "decode-0"), (both.decode, "prefill-0")):
            ref = PeerRef(WorkerName(peer), Incarnation(1), both.prefill.control)
            both.answers[RequestId("again")] = Answer()
            submit = Submit(RequestId("again"), 0, RoomId("room-1"), tuple(prompt), 20, greedy(3), ref)
            worker.handle(SESSION, submit)
            (answer,) = both.run(RequestId("again"))
            assert answer.done is not None
            assert answer.done.error is ErrorKind.ROOM
            assert "room-1 exists already" in answer.done.message


def test_c5_a_prefill_that_never_answers_is_given_up_by_the_clock(model: Path) -> None:
    (prompt,) = prompts(14, 20)
    clock = ManualClock()
    with pair(model, clock=clock) as both:
        request = both.submit(prompt, greedy(3), legs=(Role.DECODE,))
        clock.advance(11)
        both.step(Role.DECODE)
        answer = both.answers[request]
        assert answer.done is not None
        assert answer.done.error is ErrorKind.ROOM
        assert "prefill-0 did not answer within 10 s" in answer.done.message


def test_c5_a_room_in_which_nothing_happens_is_given_up_by_the_clock(model: Path) -> None:
    (prompt,) = prompts(14, 20)
    clock = ManualClock()
    with pair(model, clock=clock) as both:
        both.run(both.submit(prompt, greedy(3)))
        request = both.submit(prompt, greedy(3), legs=(Role.DECODE,))
        both.step()
        clock.advance(61)
        (answer,) = both.run(request)
        assert answer.done is not None
        assert "nothing came for 60 s" in answer.done.message


def test_c5_each_leg_ends_by_its_own_deadline(model: Path) -> None:
    (prompt,) = prompts(14, 20)
    clock = ManualClock()
    with pair(model, clock=clock) as both:
        request = both.submit(prompt, greedy(3), legs=(Role.PREFILL,), deadline_s=5.0)
        for _ in range(5):
            both.step()
        clock.advance(6)
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DEADLINE


def test_d3_an_older_or_newer_incarnation_is_refused_with_both_numbers(model: Path) -> None:
    (prompt,) = prompts(15, 20)
    with pair(model) as both:
        both.answers[RequestId("x")] = Answer()
        ref = PeerRef(WorkerName("prefill-0"), Incarnation(2), both.prefill.control)
        both.decode.handle(SESSION, Submit(RequestId("x"), 0, RoomId("x"), tuple(prompt), 20, greedy(3), ref))
        (answer,) = both.run()
        assert answer.done is not None
        assert answer.done.error is ErrorKind.ROOM
        assert "prefill-0 is incarnation 1, not 2" in answer.done.message


def test_b10_a_peer_that_dies_as_soon_as_it_has_welcomed_ends_its_rooms_and_nothing_else(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(who: object) -> None:
        raise ProcessLookupError

    (prompt,) = prompts(15, 20)
    with pair(model) as both:
        with monkeypatch.context() as patched:
            patched.setattr(receiver_of(both.decode).end.transport, "watch", gone)
            (answer,) = both.run(both.submit(prompt, greedy(3)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.ROOM
        assert "died" in answer.done.message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"decode": {"cache": {"page_tokens": 32}}}, "page_tokens: prefill-0 has 16, decode-0 has 32"),
        ({"prefill": {"cache": {"page_tokens": 64}}}, "page_tokens: prefill-0 has 64, decode-0 has 16"),
    ],
)
def test_layouts_that_cannot_meet_are_refused_with_both_values(model: Path, override: Any, says: str) -> None:
    (prompt,) = prompts(16, 20)
    with pair(model, **override) as both:
        (answer,) = both.run(both.submit(prompt, greedy(3)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.ROOM
        assert says in answer.done.message


@pytest.mark.slow
def test_other_models_dtypes_and_planes_are_refused_with_both_values(model: Path, tmp_path: Path) -> None:
    from tests.support.checkpoints import make_checkpoint

    (prompt,) = prompts(16, 20)
    twin = make_checkpoint(tmp_path / "twin", "qwen3", seed=4)
    cases = [
        (twin, {}, "weights: prefill-0 has"),
        (model, {"engine": {"dtype": "bfloat16"}}, "dtype: prefill-0 has float32"),
    ]
    cases.append((model, {"transfer": {"plane": "zmq"}}, "transfer.plane: prefill-0 has local, decode-0 has zmq"))
    for folder, sections, says in cases:
        with pair(model) as both:
            both.decode.close()
            tree = {"transfer": {"plane": "local"}, "engine": {"threads": 1}, **sections}
            both.decode = Pair(folder, config_from_dict(tree), 1024, both.clock).decode
            (answer,) = both.run(both.submit(prompt, greedy(3)))
            assert answer.done is not None
            assert says in answer.done.message


@pytest.mark.slow
def test_more_requests_than_fit_wait_for_pages_and_all_are_answered(model: Path, oracle: Oracle) -> None:
    asked = prompts(17, *[60] * 12)
    with pair(model, tokens=256, prefill={"chunk_tokens": 64}) as both:
        answers = both.run(*[both.submit(p, greedy(20)) for p in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            expect_equal(oracle, prompt, answer)


@pytest.mark.slow
def test_c11_prefill_preempts_what_has_no_grant_for_what_has_one(model: Path, oracle: Oracle) -> None:
    """Prefill's pool is filled by requests that decode has not granted; the granted one still gets on."""
    first, *others = prompts(18, 100, 100, 100, 100)
    with pair(model, tokens=320, prefill={"cache": {"device_tokens": 320}}) as both:
        early = [both.submit(p, greedy(5), legs=(Role.PREFILL,)) for p in others]
        for _ in range(8):
            both.step(Role.PREFILL)
        late = both.submit(first, greedy(5))
        (answer,) = both.run(late)
        expect_equal(oracle, first, answer)
        assert both.prefill.status().counters["preemptions"] == 1, "no more than there must"
        for request, prompt in zip(early, others, strict=True):
            number = request.removeprefix("r")
            ref = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.prefill.control)
            submit = Submit(request, 0, RoomId(f"room-{number}"), tuple(prompt), 100, greedy(5), ref)
            both.decode.handle(SESSION, submit)
        for prompt, answer in zip(others, both.run(*early), strict=True):
            expect_equal(oracle, prompt, answer)


def test_what_was_swapped_out_waits_without_a_page_and_its_worker_checks_out(model: Path) -> None:
    first, *others = prompts(27, 100, 100, 100, 100)
    with pair(model, tokens=320, prefill={"cache": {"device_tokens": 320}}) as both:
        early = [both.submit(p, greedy(5), legs=(Role.PREFILL,)) for p in others]
        for _ in range(8):
            both.step(Role.PREFILL)
        late = both.submit(first, greedy(5))
        while both.answers[late].done is None:
            both.step()
            assert both.prefill.check().violations == ()
        assert both.prefill.status().counters["preemptions"] >= 1
        for request in early:
            both.cancel(request)


def test_prefill_says_how_many_run_and_how_many_wait(model: Path) -> None:
    with pair(model, prefill={"max_running": 1}) as both:
        asked = [both.submit(p, greedy(5), legs=(Role.PREFILL,)) for p in prompts(28, 40, 50, 60)]
        assert (both.prefill.status().running, both.prefill.status().waiting) == (0, 3)
        both.step(Role.PREFILL)
        assert (both.prefill.status().running, both.prefill.status().waiting) == (1, 2)
        for request in asked:
            both.cancel(request)


def test_an_idle_prefill_worker_sleeps_and_one_with_an_audit_to_do_does_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(29, 40)
    with pair(model) as both:
        slept: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(both.prefill.setup.waiter, "wait", slept.append)
            both.prefill.wait(0.5)
            assert slept == [0.5]
            both.prefill.handle(SESSION, Audit(RequestId("a"), 0, (*prompt, 3), 40, greedy(1)))
            both.prefill.wait(0.5)
            assert slept == [0.5], "there is an audit to go on with"
            request = both.submit(prompt, greedy(5), legs=(Role.PREFILL,))
            both.prefill.wait(0.5)
            assert slept == [0.5, 0.5], "a request that waits to be admitted has its worker woken by what it waits for"
        ((_, told),) = [e for e in both.prefill.step() if isinstance(e[1], Audited)]
        assert isinstance(told, Audited)
        both.cancel(request)


def test_decode_refuses_a_request_that_nobody_hands_over(model: Path) -> None:
    with pair(model) as both:
        both.decode.handle(SESSION, Submit(RequestId("alone"), 0, RoomId("room"), (1, 2, 3), 3, greedy(5), None))
        ((_, told),) = both.decode.step()
        assert isinstance(told, Done)
        assert told.error is ErrorKind.INVALID
        assert "needs a prefill worker" in told.message


def test_a_hand_over_that_can_not_be_sealed_fails_and_names_the_decode_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(30, 40)
    with pair(model) as both:

        def unwritten(*args: object) -> None:
            raise WireError("something isn't written")

        with monkeypatch.context() as patch:
            patch.setattr(both.prefill.setup.sender, "seal", unwritten)
            (answer,) = both.run(both.submit(prompt, greedy(5)))
        assert answer.done is not None
        assert (answer.done.error, answer.done.blame) == (ErrorKind.ROOM, "decode-0")
        assert "isn't written" in answer.done.message


def test_decode_says_when_it_had_its_first_step_and_when_it_was_done(model: Path) -> None:
    clock = ManualClock()
    (prompt,) = prompts(31, 40)
    with pair(model, clock=clock) as both:
        request = both.submit(prompt, greedy(4))
        steps: dict[int, float] = {}
        while both.answers[request].done is None:
            clock.advance(0.25)
            both.step()
            steps.setdefault(len(both.answers[request].tokens), clock.now())
        marks = both.answers[request].progress[Role.DECODE].marks
        assert marks["done"] - marks["first_step"] == pytest.approx(steps[4] - steps[2]), "prefill draws the first"


def test_c10_what_can_never_fit_is_refused_with_the_numbers(model: Path) -> None:
    (prompt,) = prompts(19, 100)
    with pair(model, tokens=128) as both:
        answers = both.run(both.submit(prompt, greedy(40)), both.submit(prompt * 41, greedy(4)))
        for answer, says in zip(
            answers, ("140 positions exceed what", "4104 positions exceed the context of 4096"), strict=True
        ):
            assert answer.done is not None
            assert answer.done.error is ErrorKind.TOO_LONG
            assert says in answer.done.message


def test_a_draining_worker_admits_nothing_and_finishes_what_it_has(model: Path, oracle: Oracle) -> None:
    one, other = prompts(20, 40, 40)
    with pair(model) as both:
        running = both.submit(one, greedy(10))
        both.step()
        both.decode.drain()
        both.prefill.drain()
        late = both.submit(other, greedy(10))
        first, second = both.run(running, late)
        expect_equal(oracle, one, first)
        assert second.done is not None
        assert second.done.error is ErrorKind.DRAINING
        both.settle()
        assert both.prefill.drained
        assert both.decode.drained
        both.prefill.undrain()
        both.decode.undrain()
        (again,) = both.run(both.submit(other, greedy(10)))
        expect_equal(oracle, other, again)


def test_d5_a_later_attempt_makes_an_earlier_one_go(model: Path, oracle: Oracle) -> None:
    """The stream broke, so nothing was cancelled; the router comes again on a new stream."""
    (prompt,) = prompts(22, 64)
    with pair(model) as both:
        request = both.submit(prompt, greedy(40))
        while len(both.answers[request].tokens) < 3:
            both.step()
        peers: dict[Worker, PeerRef] = {
            both.prefill: PeerRef(WorkerName("decode-0"), Incarnation(1), ""),
            both.decode: PeerRef(WorkerName("prefill-0"), Incarnation(1), both.prefill.control),
        }
        for worker, peer in peers.items():
            submit = Submit(request, 1, RoomId("room-again"), tuple(prompt), 64, greedy(40), peer)
            worker.handle(SessionId(2), submit)
            worker.handle(SESSION, Cancel(request, 0))
        (answer,) = both.run(request)
        expect_equal(oracle, prompt, answer)
        assert len(answer.list) == 40
        assert answer.done is not None
        assert answer.done.attempt == 1


def test_a_router_that_is_gone_takes_its_requests_with_it(model: Path) -> None:
    (prompt,) = prompts(21, 64)
    with pair(model) as both:
        both.submit(prompt, greedy(200))
        for _ in range(6):
            both.step()
        both.prefill.drop_session(SESSION)
        both.decode.drop_session(SESSION)


def test_a_fenced_worker_says_nothing_any_more(model: Path) -> None:
    (prompt,) = prompts(21, 64)
    with pair(model, settle=False) as both:
        both.submit(prompt, greedy(200))
        both.prefill.fence()
        both.decode.fence()
        for _ in range(6):
            both.step()
        (answer,) = both.answers.values()
        assert answer == Answer()
