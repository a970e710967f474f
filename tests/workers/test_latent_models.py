"""Both real workers over latents and index keys: the oracle's tokens, over hand-overs and shared prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.harness import Bench
from tests.support.checkpoints import VOCAB, Oracle, compare
from tests.support.model_families import FAMILIES
from tests.support.worker_pair import Pair, pair
from twinpool.contracts.ids import Role
from twinpool.contracts.sampling_params import SamplingParams

PAGE = 16
SAID = SamplingParams(max_tokens=12, temperature=0.0)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its selection is of 64 positions: far less than the prompts below have."""
    return FAMILIES["glm5"](tmp_path_factory.mktemp("models") / "glm5", seed=4)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def talk(both: Pair, asked: list[list[int]]) -> list[list[int]]:
    """Answers to all but the last two prompts at once, then to those two, which begin as one of the others does."""
    first = both.run(*(both.submit(prompt, SAID) for prompt in asked[:-2]))
    later = both.run(*(both.submit(prompt, SAID) for prompt in asked[-2:]))
    assert later[0].progress[Role.PREFILL].cached_tokens >= 192, "whole pages of the shared prefix"
    return [answer.list for answer in (*first, *later)]


@pytest.mark.parametrize("plane", ["shm", "zmq", "staged"])
def test_answers_are_the_oracles_over_chunks_and_shared_prefixes(glm5: Path, plane: str) -> None:
    oracle, asked = Oracle(glm5), prompts(1, 1, 64, 65, 300)
    asked += [asked[-1][:200] + words for words in prompts(2, 30, 90)]
    with pair(
        glm5, tokens=4096, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": 50}, transfer={"plane": plane}
    ) as both:
        for prompt, answer in zip(asked, talk(both, asked), strict=True):
            verdict = compare(oracle, prompt, answer)
            assert verdict.equal, verdict


def test_float8_index_keys_and_their_scales_are_handed_over_too(glm5: Path) -> None:
    """The same tokens as one engine alone gives with float8 keys, exactly; one lost scale would change selections."""
    asked = prompts(3, 100, 300)
    asked += [asked[-1][:200] + words for words in prompts(4, 30, 90)]
    alone = Bench(glm5, options={"index_float8": True})
    with pair(
        glm5, tokens=4096, cache={"page_tokens": PAGE, "index_dtype": "fp8"}, prefill={"chunk_tokens": 50}
    ) as both:
        answers = talk(both, asked)
    assert answers == [alone.generate(prompt, SAID.max_tokens) for prompt in asked]
