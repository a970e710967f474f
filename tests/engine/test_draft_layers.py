"""Draft layers against a plain definition: what they propose, whatever chunks, batches and pages a sequence came in."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.harness import GREEDY, Bench, Held
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.family_hybrid import with_mtp
from tests.support.model_families import FAMILIES
from tests.support.plain_drafts import PlainEagle3, PlainMtp, PlainQwenMtp, make_eagle3
from twinpool.cache.allocation import TableSlice
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import DraftRow, TokenDraw
from twinpool.engine.runner.sampling.sampler import draw_tokens

COUNT = 4
KNOWN = tuple(range(3, VOCAB, 2))
KINDS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5", "eagle3")


class Drafted(NamedTuple):
    """A checkpoint, what drafts for it, and the plain definition of that."""

    folder: Path
    draft_model: str
    plain: PlainMtp | PlainEagle3

    def bench(self, page_tokens: int = 16) -> Bench:
        return Bench(self.folder, page_tokens, tokens=1024, draft_model=self.draft_model)


@pytest.fixture(scope="module", params=KINDS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    base = tmp_path_factory.mktemp(request.param)
    if request.param.startswith("qwen"):
        plain = with_mtp(FAMILIES[request.param](base / "plain"))
        return Drafted(FAMILIES[request.param](base / "model", published=True), "mtp", PlainQwenMtp(plain))
    if request.param != "eagle3":
        folder = FAMILIES[request.param](base / "model", published=True)
        return Drafted(folder, "mtp", PlainMtp(folder))
    folder = make_checkpoint(base / "model", layers=8)
    head = make_eagle3(base / "head", hidden=64, vocab=VOCAB, known=KNOWN)
    return Drafted(folder, str(head), PlainEagle3(folder, head))


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
@pytest.mark.every_parameter
def test_proposals_are_those_of_the_plain_definition(drafted: Drafted) -> None:
    bench = drafted.bench(page_tokens=4)
    asked = [prompt(length, length) for length in (2, 5, 9, 17, 40)]
    want = [drafted.plain.proposals(tokens, COUNT) for tokens in asked]
    assert len({tuple(some) for some in want}) == len(want), "they hang on the sequence"
    for tokens, expected in zip(asked, want, strict=True):
        count = len(tokens) - 1
        for chunks in ([count], [count - count // 3, *[1] * (count // 3)]):
            held = computed(bench, tokens, chunks)
            assert bench.engine.propose([wanted(tokens, held)]) == [expected], (len(tokens), chunks)
            bench.drop(held)
    # All together, each with as many as it asks for; what was proposed before is of no account.
    both = [(tokens, computed(bench, tokens, [len(tokens) - 1])) for tokens in asked]
    mosts = (4, 1, 3, 2, 4)
    rows = [wanted(tokens, held, most) for (tokens, held), most in zip(both, mosts, strict=True)]
    for _ in range(2):
        assert bench.engine.propose(rows) == [some[:most] for some, most in zip(want, mosts, strict=True)]


@pytest.mark.slow
def test_proposals_are_drawn_by_the_seed_and_position_that_their_tokens_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are equally likely, so that nothing but seed and position says which is drawn."""
    bench = Bench(FAMILIES["deepseek_v3"](tmp_path, published=True), 4, tokens=64, draft_model="mtp")
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=7)

    def logits(features_nh: Tensor, *_: object) -> Tensor:
        return torch.zeros(len(features_nh), VOCAB)

    monkeypatch.setattr(bench.engine.decoder, "draft_logits", logits)
    rows, expected = [], []
    for length, most in ((9, COUNT), (5, 2)):
        tokens = prompt(length, length)
        row = wanted(tokens, computed(bench, tokens, [length - 1]), most)
        rows.append(row._replace(draw=row.draw._replace(params=sampled)))
        draws = [TokenDraw(sampled, (), 1, at) for at in range(length, length + most)]
        expected.append(draw_tokens(torch.zeros(most, VOCAB), draws).tokens_n.tolist())
    assert bench.engine.propose(rows) == expected


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("nested", [False, True])
def test_a_head_says_which_layers_inputs_it_reads(tmp_path: Path, nested: bool) -> None:
    folder = make_checkpoint(tmp_path / "model", layers=8)
    head = make_eagle3(tmp_path / "head", hidden=64, vocab=VOCAB, known=KNOWN)
    said = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    config = json.loads((head / "config.json").read_text()) | ({"eagle_config": said} if nested else said)
    (head / "config.json").write_text(json.dumps(config))
    draft = Bench(folder, 4, tokens=64, draft_model=str(head)).engine.decoder.draft
    assert draft is not None
    assert draft.taps == (1, 3, 6)
