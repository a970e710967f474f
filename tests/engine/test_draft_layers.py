"""Draft layers against a plain definition: what they propose, whatever chunks, batches and pages a sequence came in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.harness import GREEDY, Bench, Held
from tests.support.checkpoints import VOCAB
from tests.support.model_families import FAMILIES
from tests.support.plain_drafts import PlainMtp
from twinpool.cache.allocation import TableSlice
from twinpool.engine.runner.batch import DraftRow, TokenDraw

FAMILIES_WITH_MTP = ("deepseek_v3", "glm4_moe")
COUNT = 4


@pytest.fixture(scope="module", params=FAMILIES_WITH_MTP)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param), published=True)


def bench(folder: Path, page_tokens: int = 16) -> Bench:
    return Bench(folder, page_tokens, tokens=1024, draft_model="mtp")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def computed(bench: Bench, tokens: Sequence[int], chunks: Sequence[int]) -> Held:
    """The state of all tokens but the last, and room for what is proposed behind it."""
    held, at = bench.hold(len(tokens) + COUNT), 0
    for chunk in chunks:
        bench.engine.forward([bench.row(tokens[at : at + chunk], at, held)])
        at += chunk
    assert at == len(tokens) - 1
    return held


def wanted(tokens: Sequence[int], held: Held, count: int = COUNT) -> DraftRow:
    tables = {pool: TableSlice.of(pages) for pool, pages in held.indices.items()}
    return DraftRow(tokens[-1], len(tokens) - 1, tables, count, TokenDraw(GREEDY, (), 1, len(tokens)))


@pytest.mark.slow
def test_proposals_are_those_of_the_plain_definition(folder: Path) -> None:
    plain, engine = PlainMtp(folder), bench(folder, page_tokens=4)
    asked = [prompt(length, length) for length in (2, 5, 9, 17, 40)]
    want = [plain.proposals(tokens, COUNT) for tokens in asked]
    assert len({tuple(some) for some in want}) == len(want), "they hang on the sequence"
    for tokens, expected in zip(asked, want, strict=True):
        count = len(tokens) - 1
        for chunks in ([count], [count - count // 3, *[1] * (count // 3)]):
            held = computed(engine, tokens, chunks)
            assert engine.engine.propose([wanted(tokens, held)]) == [expected], (len(tokens), chunks)
            engine.drop(held)
