"""A prompt that several requests have is received and kept by decode once: choices of one prompt, and equal prompts
that come at the same time. Whatever becomes of the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.checkpoints import make_checkpoint
from tests.support.model_families import FAMILIES
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import Answer, Pair, pair, turns
from tests.support.worker_parts import scheduler_of, table_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePhase

PAGE = 16
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shared") / "m", "qwen3", layers=1, eos=None)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


def choices(count: int) -> list[SamplingParams]:
    return [replace(SAMPLED, choice=choice) for choice in range(count)]


def alone(folder: Path, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Answers of requests that meet nobody and nothing of each other."""
    with pair(folder, cache={"prefix_reuse": False}) as both:
        return [both.run(both.submit(p, s))[0].list for p, s in zip(prompts, params, strict=True)]


def used(both: Pair) -> int:
    status = both.decode.status()
    return status.pages_total - status.pages_free


def received(answers: Sequence[Answer]) -> list[int]:
    """Pages that each was sent."""
    bytes_a_page = min(a.progress[Role.DECODE].transfer_bytes for a in answers if a.progress)
    return [a.progress[Role.DECODE].transfer_bytes // bytes_a_page for a in answers]


@pytest.mark.slow
@pytest.mark.parametrize("length", [16 * 20, 16 * 20 + 5])
def test_eight_choices_of_one_prompt_take_its_pages_once_and_a_tail_each(small: Path, length: int) -> None:
    prompt = words(1, length)
    want = alone(small, [prompt] * 8, choices(8))
    with pair(small) as both:
        asked = [both.submit(prompt, params) for params in choices(8)]
        most = 0
        for _ in turns(500):
            both.step()
            most = max(most, used(both))
            assert both.decode.check().violations == ()
            if all(both.answers[rid].done is not None for rid in asked):
                break
        answers = both.run(*asked)
        assert [a.list for a in answers] == want
        own = -(-(length + 20) // PAGE) - length // PAGE
        assert most <= length // PAGE + 8 * own
        sent = sum(a.progress[Role.DECODE].transfer_bytes for a in answers)
        whole = max(a.progress[Role.DECODE].transfer_bytes for a in answers)
        assert sent <= whole * (1 + 8 / (length // PAGE))


def test_a_prompt_is_shared_from_the_moment_it_has_come_and_not_when_its_answer_ends(small: Path) -> None:
    prompt = words(2, 160)
    with pair(small) as both:
        first = both.submit(prompt, replace(SAMPLED, max_tokens=400))
        while len(both.answers[first].tokens) < 3:
            both.step()
        second = both.submit(prompt, replace(SAMPLED, choice=1))
        (answer,) = both.run(second)
        assert answer.progress[Role.DECODE].cached_tokens == 160
        assert both.answers[first].done is None
        both.cancel(first)


def test_prompts_with_a_common_half_wait_for_each_other_and_those_with_less_do_not(small: Path) -> None:
    system = words(3, 96)
    near, far = system + words(4, 80), system + words(5, 200)
    mine = system + words(6, 30)
    for other, waits in ((near, True), (far, False)):
        with pair(small, prefill={"chunk_tokens": 32}) as both:
            both.submit(other, SAMPLED)
            both.step(Role.DECODE)
            both.step(Role.PREFILL)
            rid = both.submit(mine, replace(SAMPLED, choice=1))
            both.step()
            (request,) = [r for r in table_of(both.decode) if r.submit.request_id == rid]
            assert (request.phase is DecodePhase.WAITING) is waits
            (answer,) = both.run(rid)
            assert (answer.progress[Role.DECODE].cached_tokens == 96) is waits
            both.run()
            assert answer.list == alone(small, [mine], [replace(SAMPLED, choice=1)])[0]


def test_other_salts_share_nothing_and_wait_for_nobody(small: Path) -> None:
    prompt = words(7, 160)
    with pair(small) as both:
        asked = [both.submit(prompt, params, salt=f"client {n}") for n, params in enumerate(choices(3))]
        answers = both.run(*asked)
        assert [a.progress[Role.DECODE].cached_tokens for a in answers] == [0, 0, 0]


def start_receiving(both: Pair, prompt: Sequence[int], count: int) -> list[RequestId]:
    """Equal prompts, of which the first has come in part and the others wait for it."""
    asked = [both.submit(prompt, params) for params in choices(count)]
    both.step(Role.DECODE)
    for _ in range(3):
        both.step()
    phases = [r.phase for r in table_of(both.decode)]
    assert phases == [DecodePhase.ARRIVING] + [DecodePhase.WAITING] * (count - 1)
    return asked


def test_when_the_first_is_aborted_in_mid_transfer_the_others_go_on_by_themselves(small: Path) -> None:
    prompt = words(8, 320)
    want = alone(small, [prompt] * 4, choices(4))
    with pair(small, prefill={"chunk_tokens": 64}) as both:
        first, *others = start_receiving(both, prompt, 4)
        both.cancel(first)
        answers = both.run(*others)
        assert [a.list for a in answers] == want[1:]
        assert [a.progress[Role.DECODE].cached_tokens for a in answers] == [0, 320, 320]


def test_when_the_first_is_refused_by_prefill_the_next_one_is_sent_it(small: Path) -> None:
    """Its prefill leg never comes: decode waits for the room, and the others for it, but not for ever."""
    prompt = words(9, 320)
    want = alone(small, [prompt] * 3, choices(3))
    clock = ManualClock(100.0)
    with pair(small, clock=clock, settle=False, decode={"prompt_wait_s": 3.0}) as both:
        first = both.submit(prompt, choices(3)[0], legs=(Role.DECODE,))
        both.step()
        others = [both.submit(prompt, params) for params in choices(3)[1:]]
        for _ in range(20):
            both.step()
        assert not any(
            r.phase is not DecodePhase.WAITING for r in table_of(both.decode) if r.submit.request_id in others
        )
        clock.advance(3.0)
        answers = both.run(*others)
        assert [a.list for a in answers] == want[1:]
        assert both.answers[first].done is None
        both.cancel(first, legs=(Role.DECODE,))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "unlinked"])
def test_when_prefill_is_lost_in_mid_transfer_every_answer_is_right(small: Path, end: str) -> None:
    prompt = words(10, 400)
    want = alone(small, [prompt] * 4, choices(4))
    with company(small, prefills=2, decodes=1, prefill={"chunk_tokens": 32}) as group:
        rids = [group.submit(prompt, params) for params in choices(4)]
        for _ in range(6):
            group.step()
        busy = group.told[rids[0]].request.prefill
        assert busy is not None
        if end == "killed":
            group.gone(busy[0])
        else:
            group.core.on_unlinked(busy, "cut")
            group.act()
            group.core.on_linked(busy)
            group.act()
        assert group.run(*rids) == want


@pytest.mark.slow
@pytest.mark.parametrize("reached", [1, 8])
def test_choices_migrate_to_another_worker_and_their_prompt_is_right_there(small: Path, reached: int) -> None:
    prompt = words(11, 200)
    params = [replace(p, max_tokens=60) for p in choices(3)]
    want = alone(small, [prompt] * 3, params)
    with company(small, prefills=1, decodes=2) as group:
        group.drain("decode-1")
        rids = [group.submit(prompt, p) for p in params]
        group.until(lambda: all(generated(group, rid, reached)() for rid in rids), "some tokens")
        group.drain("decode-1", False)
        group.drain("decode-0")
        assert group.run(*rids) == want


def test_choices_that_are_retracted_come_back_to_a_prompt_that_they_share(small: Path) -> None:
    prompt = words(12, 200)
    params = [replace(p, max_tokens=40) for p in choices(4)]
    want = alone(small, [prompt] * 4, params)
    sections: dict[str, Any] = {"faults": {"retract_every": 5}, "cache": {"host_bytes": 1 << 24}}
    sections["decode"] = {"retract": "copy"}
    with pair(small, settle=False, **sections) as both:
        answers = both.run(*[both.submit(prompt, p) for p in params])
        assert [a.list for a in answers] == want
        assert both.decode.status().counters["retractions"] > 4
        assert both.decode.check().violations == ()


def test_in_short_memory_choices_fit_that_would_not_with_a_prompt_each(small: Path) -> None:
    """Room for the prompt twice: eight choices run at once, and nobody is retracted."""
    prompt = words(13, 320)
    want = alone(small, [prompt] * 8, choices(8))
    with pair(small, tokens={Role.PREFILL: 4096, Role.DECODE: 640}) as both:
        asked = [both.submit(prompt, params) for params in choices(8)]
        most = 0
        for _ in turns(400):
            both.step()
            most = max(most, len(scheduler_of(both.decode).running))
            if all(both.answers[rid].done is not None for rid in asked):
                break
        answers = both.run(*asked)
        assert [a.list for a in answers] == want
        assert most == 8
        assert both.decode.status().counters["retractions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v32", "llama"])
def test_every_kind_of_state_is_right_where_the_prompt_is_shared(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "m")
    prompt = words(14, 150)
    params = [replace(p, max_tokens=24) for p in choices(4)]
    want = alone(folder, [prompt] * 4, params)
    with pair(folder, tokens=2048, prefill={"chunk_tokens": 48}) as both:
        asked = [both.submit(prompt, p) for p in params]
        answers = both.run(*asked)
        assert [a.list for a in answers] == want
        assert [a.progress[Role.DECODE].cached_tokens for a in answers] == [0, 144, 144, 144]
