"""Conversations through a pair of workers with all tiers, for the tests that look at what the tiers did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.conversations import Talk, Turn
from tests.support.worker_pair import Pair
from tests.support.worker_parts import manager_of
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

PAGE = 16
PAGE_BYTES = 512 * PAGE
"""Of the small checkpoints of these tests, in float32."""
TOKENS = 9
"""In each answer."""
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0)


def converse(
    both: Pair,
    talks: Sequence[Talk],
    at_once: int = 3,
    *,
    quiet: bool = False,
    between: Callable[[], None] = lambda: None,
) -> list[Turn]:
    """Every conversation to its end, `at_once` of them at a time; `quiet`: a turn begins when all copies are done."""
    waiting = list(enumerate(talks))
    answers: dict[int, list[tuple[int, ...]]] = {number: [] for number, _ in waiting}
    live: dict[int, RequestId] = {}
    turns: list[Turn] = []
    for _ in range(200_000):
        while waiting and len(live) < at_once:
            number, talk = waiting.pop(0)
            live[number] = both.submit(talk.prompt(answers[number]), GREEDY)
        if not live:
            return turns
        both.step()
        between()
        for number, request in list(live.items()):
            if both.answers[request].done is None or (quiet and busy(both)):
                continue
            turns.append(turn_of(both, request, number, talks[number].prompt(answers[number]), len(answers[number])))
            answers[number].append(turns[-1].answer)
            del live[number]
            if len(answers[number]) == len(talks[number].says):
                continue
            if talks[number].goes_on_at_once(len(answers[number])):
                live[number] = both.submit(talks[number].prompt(answers[number]), GREEDY)
            else:
                waiting.append((number, talks[number]))
    raise AssertionError(f"no end: {live}")


def busy(both: Pair) -> bool:
    return any(manager_of(worker).busy for worker in (both.prefill, both.decode))


def turn_of(both: Pair, request: RequestId, number: int, prompt: list[int], turn: int) -> Turn:
    answer = both.answers[request]
    assert answer.done is not None
    assert answer.done.error is None, answer.done
    prefill, decode = answer.progress[Role.PREFILL], answer.progress[Role.DECODE]
    assert prefill.cached_tokens == sum(prefill.cached_by_tier.values())
    assert decode.computed_tokens == 0
    return Turn(
        number, turn, tuple(prompt), tuple(answer.list), prefill.cached_by_tier,
        prefill.computed_tokens, decode.cached_tokens, decode.transfer_bytes,
    )  # fmt: skip


def by_turn(turns: Sequence[Turn]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(t.talk, t.number): t.answer for t in turns}


def expect_hand_overs(turns: Sequence[Turn]) -> None:
    """Decode was sent exactly what it didn't hold."""
    for turn in turns:
        pages, (held, beside) = -(-len(turn.prompt) // PAGE), divmod(turn.held, PAGE)
        assert not beside
        assert turn.received_bytes == (pages - held) * PAGE_BYTES


def counters(both: Pair, role: Role = Role.PREFILL) -> dict[str, float]:
    return (both.prefill if role is Role.PREFILL else both.decode).status().counters


def tiers(host_pages: int, **cache: Any) -> dict[str, Any]:
    return {"page_tokens": PAGE, "host_bytes": (1 + host_pages) * PAGE_BYTES, "load_back": "always", **cache}


def in_folder(path: Path) -> dict[str, Any]:
    return {"storage": {"backend": "file", "path": str(path)}, "prefetch": {"policy": "wait_complete"}}
