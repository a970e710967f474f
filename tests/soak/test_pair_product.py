"""The full product: every model, rope, dtype, page size, chunk size and data plane, through both workers.

Each cell prefills and decodes the same 64 prompts of 1 to 2,000 tokens, 16 at a time, with prefixes that are shared
and prompts that are repeated; the workers hand every request over page by page. The whole takes about half an hour on
one core; a slice is chosen with `-k`, for example ``-m soak -k "qwen3 and not untied and llama3 and p16"``.

float32 answers must be the oracle's, or differ first where its two best logits are closer than twice its own
difference between one shot and chunks; at most 1 prompt in 100 of a cell may use that. bfloat16 answers are judged on
their own tokens: at each of them the oracle, teacher-forced, has no logit further above the chosen one than twice that
difference.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import VOCAB, Oracle, Verdict, compare_forced, make_checkpoint
from tests.support.worker_pair import Answer, Pair, pair
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

PROMPTS = 64
AT_A_TIME = 16
TOKENS = 40
LONGEST = 2000
POOL_TOKENS = 16384
CHUNKS = (512, 200)
"""One divides into attention's blocks and into pages, the other into neither of the larger ones."""
ALLOWED_PER_CENT = 1

MakeModel = Callable[[str, bool, str, str], "Model"]


class Model:
    """One checkpoint with its oracle's answers, which all page and chunk sizes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.oracle = Oracle(folder)
        self.prompts = make_prompts()
        self.answer = cache(self._answer)

    def _answer(self, number: int) -> list[int]:
        return self.oracle.generate(self.prompts[number], TOKENS)


def make_prompts() -> list[list[int]]:
    """Random prompts of 1 to 2,000 tokens: some whole repeats, some with a common start, most with neither."""
    rng = random.Random(0)
    prompts: list[list[int]] = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 15, 16, 17, 64, 65, LONGEST)]
    while len(prompts) < PROMPTS:
        length = round(LONGEST ** rng.random())
        kind = rng.random()
        if kind < 0.15:
            prompts.append(list(rng.choice(prompts)))
            continue
        start = rng.choice(prompts)[: rng.randrange(1, LONGEST)] if kind < 0.5 else []
        prompts.append([*start, *(rng.randrange(VOCAB) for _ in range(length))][:LONGEST])
    rng.shuffle(prompts)
    return prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    base = tmp_path_factory.mktemp("product")

    @cache
    def make(kind: str, tied: bool, rope: str, dtype: str) -> Model:
        folder = base / f"{kind}-{tied}-{rope}-{dtype}"
        return Model(make_checkpoint(folder, kind, tied=tied, rope=rope, dtype=dtype))

    return make


def ask(both: Pair, prompts: list[list[int]]) -> list[Answer]:
    """All prompts through both workers, the next one submitted as soon as one of 16 is done."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    waiting = list(prompts)
    asked: list[RequestId] = []
    while waiting or any(both.answers[r].done is None for r in asked):
        while waiting and sum(both.answers[r].done is None for r in asked) < AT_A_TIME:
            asked.append(both.submit(waiting.pop(0), sampling))
        both.step()
    return [both.answers[r] for r in asked]


def judge(model: Model, number: int, dtype: str, got: list[int]) -> Verdict:
    """float32: the oracle's tokens, or the first difference within its noise. bfloat16: each token within it."""
    prompt, want = model.prompts[number], model.answer(number)
    if got == want:
        return Verdict(equal=True, exact=True)
    end = (
        len(got)
        if dtype == "bfloat16"
        else 1 + next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    )
    tokens = [*prompt, *got[: end - 1]]
    forced = model.oracle.logits(tokens).argmax(-1).tolist()
    return compare_forced(model.oracle, tokens, [*forced[: len(prompt) - 1], *got[:end]])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plane", ["local", "shm", "zmq"])
@pytest.mark.parametrize("chunk", CHUNKS, ids="c{}".format)
@pytest.mark.parametrize("page_tokens", [1, 16, 64], ids="p{}".format)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_answer_is_the_oracles(
    model: MakeModel, kind: str, tied: bool, rope: str, dtype: str, page_tokens: int, chunk: int, plane: str
) -> None:
    subject = model(kind, tied, rope, dtype)
    sections: dict[str, Any] = {
        "cache": {"page_tokens": page_tokens},
        "prefill": {"chunk_tokens": chunk},
        "transfer": {"plane": plane},
    }
    with pair(subject.folder, tokens=POOL_TOKENS, **sections) as both:
        answers = ask(both, subject.prompts)
        hits = sum(answer.progress[Role.PREFILL].cached_tokens for answer in answers)
        assert hits > 0, "prefixes are shared"
        assert both.decode.status().counters["prompt_tokens_computed"] == 0
    excused = 0
    for number, answer in enumerate(answers):
        assert answer.done is not None
        assert answer.done.error is None, answer.done
        verdict = judge(subject, number, dtype, answer.list)
        assert verdict.equal, (number, len(subject.prompts[number]), verdict)
        if not verdict.exact:
            excused += 1
            print(f"prompt {number} of {len(subject.prompts[number])} tokens: {verdict}")
    if dtype == "float32":
        assert 100 * excused <= ALLOWED_PER_CENT * len(answers)
    for one, other in itertools.combinations(range(len(answers)), 2):
        if subject.prompts[one] == subject.prompts[other]:
            assert answers[one].list == answers[other].list, "a repeated prompt has the very same answer"
