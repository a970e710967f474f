"""What retracting and resuming must show for a family, through both real workers; for `make test` and the soak.

Written once over the registry, as `family_scenes` is: a new family or buffer is in every scene without a line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.family_scenes import PAGE, Buffer, Family, buffers_of, device_bytes, greedy, tokens_of
from tests.support.worker_pair import Answer, Pair, pair
from tests.support.worker_parts import manager_of, retract_on, scheduler_of
from twinpool.cache.swap.swap_storage import SwappedState
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.decode.request import DecodeRequest
from twinpool.decode.worker import DecodeWorker

if TYPE_CHECKING:
    import pytest

Ask = tuple[list[int], int]
"""A prompt, and how many tokens are wanted."""


def mixed(count: int, *, longest: int = 60, answer: int = 30, seed: int = 11) -> list[Ask]:
    """Requests of mixed lengths, some of which begin alike."""
    rng = random.Random(seed)
    trunk = tokens_of(seed, longest)
    asks = []
    for number in range(count):
        words = tokens_of(1000 * seed + number, rng.randint(3, longest))
        if number % 4 == 0:
            words = trunk[: rng.randint(1, longest)] + words[: rng.randint(1, longest // 3)]
        asks.append((words, rng.randint(3, answer)))
    return asks


@dataclass(frozen=True)
class Run:
    """One run over all requests."""

    answers: list[list[int]]
    seconds: float
    counters: dict[str, float]

    def __str__(self) -> str:
        names = ("retractions", "resumptions", "retracted_bytes", "recomputed")
        return f"{self.seconds:.1f} s, " + ", ".join(f"{self.counters[name]:,.0f} {name}" for name in names)


def pages_of(asks: list[Ask]) -> list[int]:
    return [-(-(len(prompt) + count - 1) // PAGE) for prompt, count in asks]


def run(family: Family, asks: list[Ask], tokens: int, at_once: int, decode: dict[str, Any], **sections: Any) -> Run:
    """All of `asks`, `at_once` of them at a time, with a decode pool of so many tokens."""
    sizes = {Role.PREFILL: 32 * 1024, Role.DECODE: tokens}
    with pair(
        family.folder, tokens=sizes, cache={"page_tokens": PAGE, **family.cache}, decode=decode,
        engine=dict(family.engine), **sections,
    ) as both:  # fmt: skip
        began = time.monotonic()
        answers = _ask_all(both, asks, at_once)
        seconds = time.monotonic() - began
        assert both.decode.check().violations == ()
        counters = both.decode.status().counters
    for answer in answers:
        assert answer.done is not None
        assert answer.done.error is None, answer.done
    return Run([answer.list for answer in answers], seconds, dict(counters))


def _ask_all(both: Pair, asks: list[Ask], at_once: int) -> list[Answer]:
    waiting, asked = list(asks), []
    live: set[Any] = set()
    while waiting or live:
        while waiting and len(live) < at_once:
            prompt, count = waiting.pop(0)
            asked.append(both.submit(prompt, greedy(count)))
            live.add(asked[-1])
        both.step()
        live = {request for request in live if both.answers[request].done is None}
    return [both.answers[request] for request in asked]


def expect_same_answers(family: Family, count: int, *, at_once: int, every: int = 7, **lengths: int) -> tuple[Run, Run]:
    """With a decode pool of a tenth of what the requests of one time need, and `faults.retract_every`, tiers on:
    nothing fails, and all answers are those of a run with enough memory."""
    asks = mixed(count, **lengths)
    batch = {"max_batch_tokens": min(64, at_once), "metadata_slots": max(128, at_once)}
    calm = run(family, asks, max(sum(pages_of(asks[-at_once:])), 1) * PAGE * 2, at_once, batch)
    assert not calm.counters["retractions"]
    need = sum(sorted(pages_of(asks))[-at_once:])
    tokens = max(max(pages_of(asks)) + 1, need // 10) * PAGE
    host_bytes = 3 * device_bytes(family, need * PAGE, page_tokens=PAGE, **family.cache)
    tier = {"host_bytes": host_bytes, "device_requests": max(2, at_once // 10)}
    short = run(
        family, asks, tokens, at_once, batch | {"retract": "copy", "cache": tier}, faults={"retract_every": every}
    )
    assert short.answers == calm.answers
    assert short.counters["retractions"] > count / 2
    assert short.counters["retractions"] == short.counters["resumptions"]
    assert short.counters["recomputed"] == 0
    return calm, short


# ------------------------------------------------------------ damage


Change = Callable[[DecodeWorker, SwappedState], None]


def once_swapped(both: Pair, prompt: list[int], count: int, change: Change) -> Answer:
    """Ask; when a few tokens are there, take the request off the device, change its copy, and let it come back."""
    decode = both.decode
    assert isinstance(decode, DecodeWorker)
    asked = both.submit(prompt, greedy(count))
    for _ in range(10_000):
        if any(r.generated >= 3 for r in scheduler_of(decode).running):
            break
        both.step()
    (request,) = scheduler_of(decode).running
    request_swapped(both, decode, request)
    assert request.swapped is not None
    change(decode, request.swapped)
    return both.run(asked)[0]


def request_swapped(both: Pair, decode: DecodeWorker, request: DecodeRequest) -> None:
    """Retract it; it stays away until the next round."""
    scheduler_of(decode).retract(request)
    retract_on(decode)
    assert request.phase == "retracted"


def flip_one(buffer: Buffer, damaged: list[int]) -> Change:
    """One bit of one page or slot, the second one where the first has number 0; its number goes to `damaged`."""

    def change(decode: DecodeWorker, swapped: SwappedState) -> None:
        host, numbers = manager_of(decode).host, swapped.numbers[buffer.pool]
        assert host is not None
        at = 0 if numbers[0] else min(1, len(numbers) - 1)
        buffer.flip(host, swapped.saved.leases[buffer.pool].indices[at : at + 1], 5)
        damaged.append(numbers[at])

    return change


def scramble(buffer: Buffer) -> Change:
    """All that is swapped out of a buffer."""

    def change(decode: DecodeWorker, swapped: SwappedState) -> None:
        host = manager_of(decode).host
        assert host is not None
        indices = swapped.saved.leases[buffer.pool].indices
        assert indices, f"nothing of {buffer} is swapped out"
        buffer.scramble(host, indices, 5)

    return change


def swapped_pair(family: Family, *, verify: bool) -> Any:
    """Decode keeps no tree, so all of a request's state is its own copy."""
    host_bytes = 2 * device_bytes(family, 1024, page_tokens=PAGE, **family.cache)
    decode = {"retract": "copy", "cache": {"prefix_reuse": False, "host_bytes": host_bytes, "verify": verify}}
    return pair(
        family.folder, tokens=1024, cache={"page_tokens": PAGE, **family.cache}, decode=decode,
        engine=dict(family.engine),
    )  # fmt: skip


def expect_swapped_damage_is_caught(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    """Each registered buffer, damaged by a bit while it is swapped out: the attempt ends as damaged, is counted, and
    the log names the page by its number in the request."""
    with swapped_pair(family, verify=True) as both:
        spec = manager_of(both.decode).spec
        for number, buffer in enumerate(buffers_of(spec), 1):
            damaged: list[int] = []
            caplog.clear()
            answer = once_swapped(both, tokens_of(number, 70), 6, flip_one(buffer, damaged))
            (logged,) = (record for record in caplog.records if record.message == "state damage")
            assert vars(logged)["pages"] == {buffer.pool: damaged}
            assert answer.done is not None
            assert answer.done.error is ErrorKind.DAMAGED, (buffer, answer.done)
            assert both.decode.status().counters["states_damaged_swapped"] == number, buffer


def expect_each_buffer_is_swapped_and_read(family: Family) -> None:
    """Untouched, an answer is what it was; without tags, damage to any registered buffer changes it."""
    with swapped_pair(family, verify=False) as both:
        spec = manager_of(both.decode).spec
        for number, buffer in enumerate(buffers_of(spec), 1):
            prompt = tokens_of(number, 70)
            same = once_swapped(both, prompt, 12, lambda decode, swapped: None)
            if number == 1:
                (good,) = both.run(both.submit(prompt, greedy(12)))
                assert same.list == good.list
            other = once_swapped(both, prompt, 12, scramble(buffer))
            assert other.list != same.list, f"{buffer} was damaged while it was swapped out and nothing changed"
