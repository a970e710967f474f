"""DeepSeek-V3, DeepSeek-V3.2 and GLM-5 against transformers: latent attention, and what indexers select."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_as_close_but_where_torn
from tests.support.checkpoints import VOCAB, Oracle, compare, copy_checkpoint
from tests.support.model_families import FAMILIES
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.attention.attention_backend import SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend import torch_latent
from twinpool.engine.models.deepseek import DeepseekV32
from twinpool.engine.models.registry import read_model

Family = Callable[..., Path]
LENGTHS = (1, 2, 15, 63, 64, 65, 129, 300)
TOP_K = 64
CELLS: list[dict[str, Any]] = [
    {"name": "deepseek_v3", "published": True},
    {"name": "deepseek_v3", "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    {"name": "deepseek_v32", "published": True, "attention_bias": True},
    {"name": "glm5", "index_topk": 40, "index_head_dim": 24},
]
"""More of them, longer, are in tests/soak."""
SPARSE = ("deepseek_v32", "glm5")


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A checkpoint of one of this file's families; the same options give the same folder."""
    base = tmp_path_factory.mktemp("latent")

    @cache
    def make(options: tuple[tuple[str, Any], ...]) -> Path:
        rest = dict(options)
        return FAMILIES[rest.pop("name")](base / str(len(list(base.iterdir()))), **rest)

    return lambda **options: make(tuple(sorted(options.items())))


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def far_rows(oracle: Oracle, tokens: list[int], got: Tensor, singles: int = 20) -> int:
    """Rows of logits further from the oracle's than 4 times its own difference between one shot and chunks, and one
    shot and twice so many single tokens."""
    want, length = oracle.logits(tokens), len(tokens)
    alone, rest = [1] * singles, length - 2 * singles
    ways = ([64, 64, length - 128], [rest // 3, *alone, rest // 3, *alone, rest - 2 * (rest // 3)])
    allowed = 4 * max(float((oracle.chunked_logits(tokens, cuts) - want).abs().max()) for cuts in ways)
    worst_t = (got - want).abs().amax(1)
    print(f"furthest rows {worst_t.topk(5).values.tolist()}, allowed {allowed}")
    return int((worst_t > allowed).sum())


def described(options: Mapping[str, Any]) -> str:
    return "-".join(str(value if key == "name" else key) for key, value in options.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", CELLS, ids=described)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    family: Family, oracle_of: MakeOracle, options: dict[str, Any]
) -> None:
    folder = family(**options)
    oracle, bench = oracle_of(folder), Bench(folder)
    asked = prompts(1, *LENGTHS)
    for prompt, got in zip(asked, bench.generate_many(asked, 8, chunk=50), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, verdict
    (tokens,) = prompts(2, 300)
    beyond = far_rows(oracle, tokens, bench.forced(tokens, [100, 1, 199]))
    # Where two scores at the edge of a selection are a rounding apart, either may be chosen: its row differs.
    assert beyond <= (3 if options["name"] in SPARSE else 0)


@pytest.mark.slow
def test_bfloat16_logits_are_the_oracles_within_its_own_difference(family: Family, oracle_of: MakeOracle) -> None:
    folder = family(name="deepseek_v3", dtype="bfloat16", initializer_range=0.08)
    (tokens,) = prompts(3, 200)
    expect_as_close_but_where_torn(folder, oracle_of(folder), tokens, [150, *[1] * 50])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm5", "fp8"])
def test_a_rows_bits_hang_on_its_own_sequence_alone(family: Family, name: str, dtype: str, attention: str) -> None:
    """Whatever chunks, neighbours and pages; from short contexts, which are read whole, to long ones."""
    folder, rng = family(name="glm5" if name == "fp8" else name, dtype=dtype), random.Random(4)
    options = {"index_float8": name == "fp8"}
    (tokens,) = prompts(4, 200)
    want = Bench(folder, 16, 512, options=options, attention=attention).forced(tokens, [200])
    assert not want.isnan().any(), "something of an earlier owner was read"
    for page_tokens in (1, 64):
        bench = Bench(folder, page_tokens, 2048, page_tokens, options=options, attention=attention)
        at, held, parts = 0, bench.hold(200), []
        while at < 200:
            count = min(200 - at, rng.choice([1, 2, 3, 5, 16, 31, 64]))
            others = [
                prompt for prompt in prompts(rng.randrange(99), *rng.choices([1, 2, 70, 140], k=rng.randrange(4)))
            ]
            rows = [bench.row(prompt, 0, bench.hold(len(prompt))) for prompt in others]
            place = rng.randrange(len(rows) + 1)
            rows.insert(place, bench.row(tokens[at : at + count], at, held))
            parts.append(bench.logits(rows)[place])
            at += count
        assert torch.equal(torch.cat(parts), want), page_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm5"])
def test_small_bounds_on_memory_do_not_change_a_bit(family: Family, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens,) = prompts(5, 200)
    folder = family(name=name)
    want = Bench(folder, attention="torch").forced(tokens, [200])
    monkeypatch.setattr(torch_latent, "_SCORE_ELEMENTS", 1 << 12)
    monkeypatch.setattr(torch_latent, "_TILE_QUERIES", 4)
    assert torch.equal(Bench(folder, attention="torch").forced(tokens, [90, 110]), want)


def noted(bench: Bench) -> list[tuple[AttentionPlan, SparseSelection | None]]:
    """The selections that the bench's attention reads from now on, one a layer."""
    seen: list[tuple[AttentionPlan, SparseSelection | None]] = []
    latent = bench.engine.attention.latent
    attend = latent.attend_selected

    def attend_selected(
        q: Tensor, latents: Tensor, plan: AttentionPlan, chosen: SparseSelection | None, *rest: Any
    ) -> Tensor:
        seen.append((plan, chosen))
        return attend(q, latents, plan, chosen, *rest)

    latent.attend_selected = attend_selected  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.slow
def test_long_contexts_are_read_in_part_and_every_layer_selects(family: Family) -> None:
    """The other tests of this file mean something only if this holds."""
    (tokens,) = prompts(6, 200)
    for name, layers, chosen in (("deepseek_v32", 3, 3), ("glm5", 4, 2)):
        bench = Bench(family(name=name))
        seen = noted(bench)
        bench.forced(tokens, [60, 40, 99, 1])
        steps = [seen[at : at + layers] for at in range(0, len(seen), layers)]
        assert all(found is None for _, found in steps[0]), "60 positions are fewer than the selection holds"
        for step, rows in zip(steps[1:], (36, 99, 1), strict=True):
            selections = [found for _, found in step if found is not None]
            assert len(selections) == layers
            assert len({id(found) for found in selections}) == chosen
            first, last = selections[0], selections[-1]
            assert first.positions_sk.shape == (rows, TOP_K)
            assert not torch.equal(first.positions_sk, last.positions_sk), "layers select each for itself"
            assert (first.positions_sk.diff(dim=1) > 0).all()
        early = steps[-1][0][1]
        assert early is not None
        assert int((early.positions_sk < 136).sum()) > 32, "it is no window"


@pytest.mark.slow
def test_layers_that_share_a_selection_keep_no_index_keys(family: Family) -> None:
    for name, index_layers in (("deepseek_v32", 3), ("glm5", 2)):
        for float8 in (False, True):
            pools = Bench(family(name=name), options={"index_float8": float8}).pools.spec
            layers = {buffer.name: buffer.layers for buffer in pools.full.buffers}
            assert layers.pop("latent") == (3 if name == "deepseek_v32" else 4)
            assert layers == dict.fromkeys(["index_k", "index_scale"] if float8 else ["index_k"], index_layers)


@pytest.mark.slow
def test_float8_keys_select_nearly_the_same_positions(family: Family, oracle_of: MakeOracle) -> None:
    """What `cache.index_dtype: fp8` does to the selection: a few in a hundred positions are others."""
    (tokens,) = prompts(7, 600)
    for name in SPARSE:
        found = []
        for float8 in (False, True):
            bench = Bench(family(name=name), options={"index_float8": float8})
            seen = noted(bench)
            bench.forced(tokens, [600])
            found.append(seen[0][1])
        plain, rounded = found
        assert plain is not None
        assert rounded is not None
        same = [
            len(set(a) & set(b))
            for a, b in zip(plain.positions_sk.tolist(), rounded.positions_sk.tolist(), strict=True)
        ]
        overlap = sum(same) / (TOP_K * len(same))
        assert 0.95 < overlap < 1.0, overlap
        print(f"{name}: {overlap:.3f} of the positions are the same with float8 index keys")


def test_numbers_that_cannot_be_are_refused_in_one_line(family: Family, tmp_path: Path) -> None:
    v3, glm = family(name="deepseek_v3"), family(name="glm5", published=True)
    cases: list[tuple[Path, dict[str, object], str]] = [
        (v3, {"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        (v3, {"n_group": 3}, "2 of 3 groups|1 of 3 groups"),
        (v3, {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid"),
        (v3, {"topk_method": "greedy"}, "topk_method must be one of noaux_tc"),
        (v3, {"qk_rope_head_dim": 7}, "must be even"),
        (v3, {"kv_lora_rank": 31}, r"has shape \[40, 64\], but config.json asks for \[39, 64\]"),
        (v3, {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must be a list of 3"),
        (glm, {"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        (glm, {"indexer_types": ["shared", "full", "full", "full"]}, "there is none before it"),
        (glm, {"indexer_types": None, "index_topk_pattern": "FSX"}, "must be 4 letters F or S"),
        (glm, {"q_lora_rank": None}, "q_lora_rank is missing"),
    ]
    for number, (folder, changes, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message) as error:
            read_model(copy_checkpoint(folder, tmp_path / str(number), **changes))
        assert "\n" not in str(error.value)


def test_every_spelling_of_shared_layers_is_read(family: Family, tmp_path: Path) -> None:
    folder = family(name="glm5", published=True)
    spellings: list[dict[str, object]] = [
        {"index_topk_pattern": "FSFS"},
        {"index_topk_pattern": ["full", "shared"] * 2},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ]
    for number, spelling in enumerate(spellings):
        model = read_model(copy_checkpoint(folder, tmp_path / str(number), indexer_types=None, **spelling))
        assert isinstance(model, DeepseekV32)
        assert model.chooses == [True, False, True, False], spelling
