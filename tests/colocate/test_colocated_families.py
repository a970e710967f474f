"""Every family on a colocated worker: its answers, all of its state through all tiers, retracted and brought back."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.colocated_worker import Colocated, colocated
from tests.support.family_scenes import CHUNK, PAGE, Family, Watch, device_bytes, greedy, make_family, tokens_of
from tests.support.model_families import FAMILIES
from tests.support.worker_pair import Answer
from tests.support.worker_parts import manager_of
from twinpool.contracts.ids import RequestId, Role

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_family(request.param, tmp_path_factory.mktemp("families"))
    torch.set_num_threads(threads)


def ask(both: Colocated, prompts: Sequence[Sequence[int]], count: int, at_once: int = 8) -> list[Answer]:
    """All of them, the next one as soon as one is done; every answer must be whole."""
    waiting, asked = list(prompts), list[RequestId]()
    while waiting or any(both.answers[r].done is None for r in asked):
        while waiting and sum(both.answers[r].done is None for r in asked) < at_once:
            asked.append(both.submit(waiting.pop(0), greedy(count)))
        both.step()
    answers = [both.answers[r] for r in asked]
    assert all(a.done is not None and a.done.error is None for a in answers)
    return answers


def test_answers_are_the_oracles_alone_and_with_a_prefix_that_is_there(family: Family) -> None:
    prompts = [tokens_of(seed, length) for seed, length in enumerate((1, 2, 16, 17, 65, 130, 200))]
    trunk = prompts[-1]
    shared = [trunk[:cut] + tokens_of(100 + cut, 9) for cut in (100, 197)] + [trunk]
    with colocated(
        family.folder, tokens=16384, prefill={"chunk_tokens": CHUNK}, cache={"page_tokens": PAGE},
        colocate={"prompt_tokens": PAGE},
    ) as both:  # fmt: skip
        answers = ask(both, prompts, 10)
        first = both.submit(trunk, greedy(30))
        while len(both.answers[first].tokens) < 2:
            both.step()
        again = ask(both, shared, 10)
        counters = both.worker.status().counters
        assert again[-1].progress[Role.PREFILL].cached_tokens > 0, "what was computed before is found again"
        assert counters["mixed_steps"] > 0
        assert counters["received_bytes"] == 0
        both.run(first)
    for prompt, answer in zip([*prompts, *shared], [*answers, *again], strict=True):
        family.expect(prompt, answer.list)


def test_state_of_every_kind_goes_through_all_tiers_and_is_retracted_and_brought_back(family: Family) -> None:
    rng, talks, asked = random.Random(7), 6, list[tuple[list[int], list[int]]]()
    said = [tokens_of(200 + n, rng.randint(40, 150)) for n in range(talks)]
    small = {"page_tokens": PAGE, "device_requests": 4}
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 28}
    host_bytes = 3 * device_bytes(family, 26 * PAGE, **small)
    cache: dict[str, Any] = small | {"host_bytes": host_bytes, "load_back": "always", "storage": storage}
    with colocated(
        family.folder, tokens=26 * PAGE, prefill={"chunk_tokens": CHUNK}, faults={"retract_every": 5},
        cache=cache | {"prefetch": {"policy": "wait_complete"}}, decode={"retract": "copy"},
        colocate={"prompt_tokens": PAGE},
    ) as both:  # fmt: skip
        watch = Watch(manager_of(both.worker))
        for _ in range(2):
            for words, answer in zip(said, ask(both, said, 9, at_once=3), strict=True):
                asked.append((list(words), answer.list))
                words += [*answer.list, *tokens_of(len(asked), rng.randint(1, 30))]
        counters = both.worker.status().counters
        assert counters["pages_damaged_on_host"] == counters["pages_damaged_in_storage"] == 0
        assert counters["resumptions"] > 5
        for pool in manager_of(both.worker).spec.by_name:
            assert watch.hits[pool], f"{pool} was never hit"
        assert watch.loaded, "nothing came from the host"
    for prompt, tokens in asked:
        family.expect(prompt, tokens)
