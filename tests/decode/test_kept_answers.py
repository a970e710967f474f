"""The answers that a worker keeps: bounded by number, memory and time, and recounted."""

from __future__ import annotations

import random

from msgspec.structs import replace

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer
from twinpool.contracts.sampling_params import ChosenExperts, TokenLogprob
from twinpool.decode.kept_answers import KeptAnswers, estimated_bytes


def answer(tokens: int = 5, index: int = 0, logprobs: int = 0) -> KeptAnswer:
    scored = tuple(TokenLogprob(n, -1.0, ((n, -1.0),)) for n in range(logprobs))
    return KeptAnswer(RequestId("r"), 0, index, 7, 3, 50, 60.0, tuple(range(tokens)), scored, reason="length")


def name(key: str, index: int = 0) -> AnswerName:
    return AnswerName(key, "body", index, 7)


def test_answers_are_found_by_key_in_order_of_choice_and_stay() -> None:
    clock = ManualClock(100.0)
    kept = KeptAnswers(DecodeConfig(), clock)
    kept.keep(name("k", 1), answer(index=1), 0)
    kept.keep(name("k", 0), answer(index=0), 0)
    kept.keep(name("other"), answer(), 0)
    clock.advance(10.0)
    for _ in range(2):
        assert [(n.index, a.index, a.left_s) for n, a in kept.of("k")] == [(0, 0, 50.0), (1, 1, 50.0)]
    clock.advance(51.0)
    assert [a.left_s for _, a in kept.of("k")] == [0.0, 0.0], "its request has no time left"


def test_an_answer_is_forgotten_when_its_time_is_over() -> None:
    clock = ManualClock(100.0)
    kept = KeptAnswers(DecodeConfig(kept_answer_s=20.0), clock)
    kept.keep(name("k"), answer(), 0)
    deadlines = [kept.next_deadline]
    clock.advance(19.9)
    kept.expire()
    assert len(kept) == 1
    clock.advance(0.1)
    assert kept.of("k") == []
    kept.expire()
    deadlines.append(kept.next_deadline)
    assert (len(kept), kept.nbytes, deadlines) == (0, 0, [120.0, None])


def test_all_whose_time_is_over_are_forgotten_at_once_and_none_of_them_before_its_time() -> None:
    clock = ManualClock(100.0)
    kept = KeptAnswers(DecodeConfig(kept_answer_s=20.0), clock)
    for number in range(3):
        kept.keep(name("k", number), answer(), 0)
    clock.advance(1.0)
    kept.keep(name("later"), answer(), 0)
    clock.advance(19.0)
    kept.expire()
    assert (len(kept), kept.nbytes, kept.next_deadline) == (1, 1024 + 5 * 40, 121.0)
    assert kept.forgotten == 0


def test_an_answers_memory_is_that_of_its_tokens_their_log_probabilities_and_the_best_at_each_position() -> None:
    plain, scored = answer(5), answer(5, logprobs=5)
    bare = replace(scored, logprobs=tuple(replace(one, top=()) for one in scored.logprobs))
    assert [estimated_bytes(one) for one in (plain, bare, scored)] == [1224, 2224, 2974]
    routed = [replace(one, experts=ChosenExperts(2, bytes(16))) for one in scored.logprobs]
    assert estimated_bytes(replace(scored, logprobs=tuple(routed))) == 2974 + 5 * 16


def test_the_oldest_makes_room_for_those_that_run_for_nobody_too() -> None:
    kept = KeptAnswers(DecodeConfig(kept_answers=4), ManualClock(0.0))
    for number in range(6):
        kept.keep(name(f"k{number}"), answer(), 0)
    assert [bool(kept.of(f"k{number}")) for number in range(6)] == [False, False, True, True, True, True]
    assert kept.room(unowned=2)
    assert (len(kept), kept.check(3)) == (1, [])
    assert not kept.room(unowned=4)
    assert len(kept) == 0
    kept.keep(name("late"), answer(), 4)
    assert len(kept) == 0, "those that run come before those that have ended"


def test_memory_is_bounded_with_log_probabilities() -> None:
    most = 3 * estimated_bytes(answer(100, logprobs=100))
    kept = KeptAnswers(DecodeConfig(kept_answer_bytes=most), ManualClock(0.0))
    for number in range(5):
        kept.keep(name(f"k{number}"), answer(100, logprobs=100), 0)
        assert kept.check(0) == []
    assert (len(kept), kept.forgotten) == (3, 2)
    kept.keep(name("huge"), answer(100_000, logprobs=100_000), 0)
    assert not kept.of("huge")
    assert (len(kept), kept.forgotten) == (3, 3), "one that is kept for no moment is forgotten too"


def test_where_a_later_answer_of_a_name_has_no_room_the_earlier_one_is_not_given_in_its_place() -> None:
    kept = KeptAnswers(DecodeConfig(kept_answer_bytes=2000), ManualClock(0.0))
    kept.keep(name("k"), answer(5), 0)
    kept.keep(name("k"), answer(100), 0)
    assert (kept.of("k"), kept.nbytes, kept.forgotten) == ([], 0, 1)


def test_none_are_kept_where_the_configuration_says_so() -> None:
    kept = KeptAnswers(DecodeConfig(kept_answers=0), ManualClock(0.0))
    kept.keep(name("k"), answer(), 0)
    assert (len(kept), kept.nbytes) == (0, 0)


def test_the_books_hold_whatever_comes() -> None:
    rng, clock = random.Random(1), ManualClock(0.0)
    kept = KeptAnswers(DecodeConfig(kept_answers=20, kept_answer_s=5.0, kept_answer_bytes=60_000), clock)
    for _ in range(3000):
        unowned, key = rng.randrange(25), name(f"k{rng.randrange(40)}", rng.randrange(3))
        match rng.randrange(4):
            case 0:
                kept.keep(key, answer(rng.randrange(300), key.index, rng.randrange(50)), unowned)
            case 1:
                kept.forget(key)
            case 2:
                kept.room(unowned)
            case _:
                clock.advance(rng.random())
                kept.expire()
        assert kept.check(0) == []
        assert sum(len(kept.of(f"k{number}")) for number in range(40)) <= len(kept) <= 20
