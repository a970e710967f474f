"""The engine's answers are transformers' answers, over pairs of everything that could matter.

Each row of `CELLS` is one checkpoint and one way to run it; any two values of two columns meet in some row. float32
must give the oracle's greedy tokens (or differ first where its two best logits are closer than its own noise);
bfloat16 is judged teacher-forced, by the oracle's own difference between one shot and chunks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import Bench, MakeCheckpoint, MakeOracle, row
from tests.support.checkpoints import VOCAB, compare, compare_forced, copy_checkpoint
from tests.support.model_families import FAMILIES
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.engine.models.registry import model_for
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.tensors.weight_loader import Weights

WHOLE = 1 << 20
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 100, 129, 300, 700)
Cell = tuple[str, bool, str, int, int, str, str]
CELLS: list[Cell] = [
    # kind, tied, rope, page_tokens, chunk, heads x head_dim / kv heads, files
    ("qwen3", True, "default", 16, WHOLE, "16x4/4", "shards"),
    ("llama", True, "llama3", 64, 64, "16x4/2", "bias"),
    ("qwen3", False, "linear", 64, 100, "64x2/1", "old"),
    ("llama", False, "yarn", 1, 32, "16x4/4", "old"),
    ("llama", True, "linear", 1, 100, "48x4/2", "new"),
    ("qwen3", False, "llama3", 16, 32, "16x4/2", "new"),
    ("qwen3", False, "yarn", 1, 64, "48x4/2", "bias"),
    ("llama", True, "yarn", 64, WHOLE, "64x2/1", "shards"),
    ("llama", False, "default", 16, 32, "64x2/1", "bias"),
    ("llama", True, "default", 1, WHOLE, "16x4/2", "old"),
    ("qwen3", True, "llama3", 64, 32, "48x4/2", "shards"),
    ("qwen3", True, "linear", 16, 64, "48x4/2", "old"),
    ("llama", True, "default", 64, 64, "16x4/4", "new"),
    ("llama", False, "yarn", 1, 100, "16x4/2", "shards"),
    ("llama", False, "llama3", 1, WHOLE, "64x2/1", "old"),
    ("llama", False, "linear", 16, 100, "16x4/4", "bias"),
    ("qwen3", False, "yarn", 16, WHOLE, "48x4/2", "new"),
    ("llama", True, "linear", 16, WHOLE, "16x4/2", "shards"),
    ("llama", False, "llama3", 1, 100, "64x2/1", "new"),
    ("qwen3", True, "linear", 16, 64, "64x2/1", "shards"),
    ("qwen3", True, "default", 16, 100, "48x4/2", "old"),
    ("qwen3", True, "llama3", 64, WHOLE, "16x4/4", "bias"),
    ("llama", False, "linear", 16, 32, "64x2/1", "old"),
]


BFLOAT16 = [pytest.param(cell, marks=[] if i % 2 == 0 else pytest.mark.soak) for i, cell in enumerate(CELLS[::2])]
"""Every other cell; half of them in soak."""


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def cell_checkpoint(checkpoint: MakeCheckpoint, cell: Cell, dtype: str) -> Path:
    kind, tied, rope, _, _, shape, files = cell
    head_dim, rest = shape.split("x")
    heads, kv_heads = rest.split("/")
    return checkpoint(
        kind,
        tied=tied,
        rope=rope,
        dtype=dtype,
        head_dim=int(head_dim),
        heads=int(heads),
        kv_heads=int(kv_heads),
        shards=3 if files == "shards" else 1,
        old_spelling=files == "old",
        bias=files == "bias",
    )


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)).replace("/", "."))
def test_float32_gives_the_oracles_greedy_tokens(checkpoint: MakeCheckpoint, oracle_of: MakeOracle, cell: Cell) -> None:
    folder = cell_checkpoint(checkpoint, cell, "float32")
    oracle = oracle_of(folder)
    bench = Bench(folder, page_tokens=cell[3])
    asked = prompts(1, *LENGTHS)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk=cell[4]), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, verdict
        if not verdict.exact:
            print(f"{len(prompt)} tokens: {verdict}")


@pytest.mark.parametrize("stored", ["own head", "copy", "head alone"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_head_beside_the_flag_that_it_is_tied_counts_as_transformers_takes_it(
    checkpoint: MakeCheckpoint, oracle_of: MakeOracle, tmp_path: Path, kind: str, stored: str
) -> None:
    """Merges and fine-tunes leave the flag as it was; some conversions write a copy, or the head alone."""
    folder = copy_checkpoint(checkpoint(kind, tied=True), tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    embed = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = embed.clone()
    if stored == "own head":
        held["lm_head.weight"] = embed.roll(7, 0).contiguous()
    elif stored == "head alone":
        del held["model.embed_tokens.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    oracle, bench, asked = oracle_of(folder), Bench(folder), prompts(3, 5, 60)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk=WHOLE), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, verdict
    taken = [Weights.dry(read_model_spec(each), gpu=True) for each in (checkpoint(kind, tied=True), folder)]
    for weights in taken:
        model_for(weights.spec).build(weights)
    assert taken[1].nbytes - taken[0].nbytes == (embed.numel() * 4 if stored == "own head" else 0), "a copy is not kept"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "embed"), [
    ("qwen2", "model.embed_tokens.weight"),
    ("mistral", "model.embed_tokens.weight"),
    ("gemma3", "language_model.model.embed_tokens.weight"),
    ("qwen3_5", "model.language_model.embed_tokens.weight"),
])  # fmt: skip
def test_a_tied_model_of_any_family_may_store_its_head_alone(tmp_path: Path, family: str, embed: str) -> None:
    """Flat configurations and those with the text's keys inside; the same bits as with the embedding alone."""
    (tokens,) = prompts(3, 60)
    folder = FAMILIES[family](tmp_path / "tied", published=True, tie_word_embeddings=True)
    want = Bench(folder).forced(tokens, [60])
    held = load_file(folder / "model.safetensors")
    for head in ("lm_head.weight", "language_model.lm_head.weight"):
        alone = copy_checkpoint(folder, tmp_path / head)
        stored = {head if name == embed else name: tensor for name, tensor in held.items()}
        assert stored.keys() != held.keys()
        save_file(stored, alone / "model.safetensors", {"format": "pt"})
        assert torch.equal(Bench(alone).forced(tokens, [60]), want)


@pytest.mark.slow
@pytest.mark.parametrize("cell", BFLOAT16, ids=lambda cell: "-".join(map(str, cell)).replace("/", "."))
def test_bfloat16_chooses_within_the_oracles_own_difference(
    checkpoint: MakeCheckpoint, oracle_of: MakeOracle, cell: Cell
) -> None:
    folder = cell_checkpoint(checkpoint, cell, "bfloat16")
    oracle = oracle_of(folder)
    bench = Bench(folder, page_tokens=cell[3])
    for prompt in prompts(2, 17, 300):
        tokens = prompt + oracle.generate(prompt, 8)
        chunks = [min(cell[4], len(prompt) - at) for at in range(0, len(prompt), cell[4])] + [1] * 8
        got = bench.forced(tokens, chunks).argmax(-1).tolist()
        verdict = compare_forced(oracle, tokens, got)
        assert verdict.equal, verdict


def test_a_float32_run_of_a_bfloat16_checkpoint_is_the_oracles_float32_run(
    checkpoint: MakeCheckpoint, oracle_of: MakeOracle
) -> None:
    from tests.support.checkpoints import Oracle

    folder = checkpoint("qwen3", dtype="bfloat16")
    (prompt,) = prompts(3, 120)
    assert compare(Oracle(folder, "float32"), prompt, Bench(folder, dtype="float32").generate(prompt, 10)).equal


@pytest.mark.slow
def test_fast_numerics_gives_the_oracles_tokens_too(checkpoint: MakeCheckpoint, oracle_of: MakeOracle) -> None:
    folder = checkpoint("llama")
    bench = Bench(folder, numerics="fast")
    assert not bench.engine.numerics.invariant
    asked = prompts(4, 1, 30, 200)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk=64), strict=True):
        assert compare(oracle_of(folder), prompt, got).equal


def test_prompt_scores_are_the_oracles_log_probabilities(
    checkpoint: MakeCheckpoint, oracle_of: MakeOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinpool.engine.runner import model_runner as module

    folder = checkpoint("llama")
    (tokens,) = prompts(5, 90)
    want = oracle_of(folder).logits(tokens).log_softmax(-1)
    monkeypatch.setattr(module, "_LOGIT_ELEMENTS", 7 * VOCAB)  # so that scoring takes several pieces
    bench = Bench(folder)
    engine: ModelRunner = bench.engine
    pages = bench.lease(90)
    other = row([5, 6, 7], 0, bench.lease(3))
    (_, out) = engine.forward([other, row(tokens[:-1], 0, pages, score=tokens[1:], score_top=3)])
    assert [s.token for s in out.scores] == tokens[1:]
    for position, score in enumerate(out.scores):
        assert score.logprob == pytest.approx(float(want[position, score.token]), abs=2e-3)
        assert [v for _, v in score.top] == pytest.approx(want[position].topk(3).values.tolist(), abs=2e-3)
