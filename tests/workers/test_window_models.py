"""Both real workers over models with windows: the oracle's tokens, while windows slide and their pages go back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import VOCAB, Oracle, compare
from tests.support.family_window import WINDOW
from tests.support.model_families import FAMILIES
from tests.support.worker_pair import pair
from tests.support.worker_parts import manager_of
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams

PAGE = 16
SAID = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["gemma3"](tmp_path_factory.mktemp("models") / "gemma3", seed=4)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 512], ids=["chunks-below-the-window", "chunks-above-it"])
def test_answers_are_the_oracles_over_chunks_and_shared_prefixes(gemma3: Path, chunk: int) -> None:
    oracle, asked = Oracle(gemma3), prompts(1, 1, WINDOW, WINDOW + 1, 200, 600)
    asked += [asked[-1][:400] + words for words in prompts(2, 30, 90)]
    with pair(gemma3, tokens=4096, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": chunk}) as both:
        first = both.run(*(both.submit(prompt, SAID) for prompt in asked[:-2]))
        later = both.run(*(both.submit(prompt, SAID) for prompt in asked[-2:]))
        for prompt, answer in zip(asked, first + later, strict=True):
            verdict = compare(oracle, prompt, answer.list)
            assert verdict.equal, verdict


@pytest.mark.slow
def test_a_turn_that_goes_on_finds_its_full_prefix_and_its_last_window(gemma3: Path) -> None:
    oracle, (words, more) = Oracle(gemma3), prompts(3, 300, 40)
    with pair(gemma3, tokens=4096, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": 64}) as both:
        (answer,) = both.run(both.submit(words, SAID))
        said = [*words, *answer.list, *more]
        (second,) = both.run(both.submit(said, SAID))
        assert second.progress[Role.PREFILL].cached_tokens >= 288, "whole pages of the first prompt"
        assert compare(oracle, said, second.list).equal


@pytest.mark.slow
def test_pages_that_the_window_has_left_go_back_while_prompt_and_answer_go_on(gemma3: Path) -> None:
    (words,) = prompts(4, 512)
    with pair(gemma3, tokens=2048, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": 32}) as both:
        request = both.submit(words, SamplingParams(max_tokens=100, temperature=0.0))
        held: list[list[int]] = []
        leased = 0
        while both.answers[request].done is None:
            both.step()
            leased = max([leased, *(allocation.own("window") for allocation in manager_of(both.prefill).allocations)])
            tables = [
                allocation.tables["window"].pages
                for allocation in manager_of(both.decode).allocations
                if allocation.tables
            ]
            held += [[page for page in table if page] for table in tables if any(table)]
        assert compare(Oracle(gemma3), words, both.answers[request].list).equal
        assert 0 < leased < 512 // PAGE // 2, "prefill takes pages for some chunks at a time"
        first, last = held[0], held[-1]
        # The last window of the prompt, then of the answer: of 512 + 100 positions never more than these.
        assert len(first) <= WINDOW // PAGE + 1 + 100 // PAGE + 1
        assert len(last) <= WINDOW // PAGE + 2
        assert set(first) - set(last), "the pages of the prompt's end went back"
