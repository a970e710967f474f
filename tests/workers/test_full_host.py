"""A host tier that is full, and written back to: nobody waits for room that nobody gives up.

Pages of the device can't be evicted above pages that somebody keeps, as long as the host has no room for them. Each
test came to a stand where every request waited and nothing was under way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import ErrorKind
from contracts.ids import RequestId, Role
from contracts.sampling_params import SamplingParams
from tests.pair import Pair, pair
from tests.tiers import PAGE, in_folder, tiers

ROUNDS = 15_000


def bursts(rng: random.Random, pages: int, count: int, most: int) -> Iterator[list[list[int]]]:
    """Groups of up to `most` prompts that come at once: beginnings of three texts, some with an end of their own, all
    of them short enough for a device of `pages` pages."""
    texts = [[rng.randrange(300) for _ in range(pages * PAGE)] for _ in range(3)]
    for _ in range(count):
        prompts = []
        for _ in range(rng.randint(2, most)):
            cut = rng.randint(1, pages - 1)
            own = rng.choice((0, 0, rng.randint(0, pages - 1 - cut)))
            prompts.append([*rng.choice(texts)[: cut * PAGE], *(rng.randrange(300) for _ in range(own * PAGE)), 7])
        yield prompts


def serve(both: Pair, prompts: list[list[int]], pages: int, rng: random.Random, tokens: int) -> None:
    """Answers of up to `tokens` tokens to all prompts, each as long as the device has pages for. What comes back for
    want of pages is sent again with what it has, as a router does."""
    asked: dict[RequestId, tuple[list[int], SamplingParams, list[int]]] = {}
    for prompt in prompts:
        most = min(tokens, pages * PAGE - len(prompt))
        if most > 0:
            sampling = SamplingParams(max_tokens=rng.randint(1, most), temperature=0.0)
            asked[both.submit(prompt, sampling)] = prompt, sampling, []
    while asked:
        again: dict[RequestId, tuple[list[int], SamplingParams, list[int]]] = {}
        for request, answer in zip(asked, both.run(*asked, rounds=ROUNDS), strict=True):
            prompt, sampling, told = asked[request]
            assert answer.done is not None
            assert answer.done.error in (None, ErrorKind.RETRACTED), answer.done
            if answer.done.error is ErrorKind.RETRACTED:
                told = [*told, *answer.list]
                again[both.submit(prompt, sampling, emitted=told)] = prompt, sampling, told
        asked = again


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "pages", "host"), [(3, 8, 3), (3, 12, 5)])
def test_c11_what_was_prefetched_for_those_who_wait_is_given_up_where_it_keeps_all_of_them_out(
    model: Path, tmp_path: Path, seed: int, pages: int, host: int
) -> None:
    rng = random.Random(seed)
    sizes = {Role.PREFILL: pages * PAGE, Role.DECODE: 64 * PAGE}
    cache = tiers(host, write_policy="back", **in_folder(tmp_path))
    with pair(model, tokens=sizes, cache=cache) as both:
        for prompts in bursts(rng, pages, 300, 6):
            serve(both, prompts, pages, rng, 1)
            if both.prefill.status().counters["prefetches_given_up"]:
                return
        raise AssertionError("it never came to that")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4])
def test_c10_one_that_is_alone_and_lacks_a_page_leaves_what_stands_twice_and_comes_back(
    model: Path, tmp_path: Path, seed: int
) -> None:
    rng, pages = random.Random(seed), 8
    sizes = {Role.PREFILL: 12 * PAGE, Role.DECODE: pages * PAGE}
    cache = tiers(5, write_policy="back", **in_folder(tmp_path))
    with pair(model, tokens=sizes, cache=cache) as both:
        for prompts in bursts(rng, pages, 200, 8):
            serve(both, prompts, pages, rng, 40)
            if both.decode.status().counters["retractions"]:
                return
        raise AssertionError("it never came to that")
