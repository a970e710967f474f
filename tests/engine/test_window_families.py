"""Gemma 3, Gemma 4 and gpt-oss against transformers, with prompts far longer than their windows."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_the_oracles, prompts
from tests.support.checkpoints import copy_checkpoint
from tests.support.family_window import WINDOW
from tests.support.model_families import FAMILIES
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.layers.moe.experts import ExpertSizes, interleaved_expert
from twinpool.engine.models.registry import read_model
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import BlockWeight, dense

Family = Callable[..., Path]
NAMES = ["gemma3", "gemma4", "gpt_oss"]
VARIANTS: list[dict[str, Any]] = [
    {"name": "gemma3", "final_logit_softcapping": 30.0, "attention_bias": True, "tie_word_embeddings": False},
    {"name": "gemma4", "enable_moe_block": True},
    {"name": "gpt_oss"},
]
"""Others, and bfloat16, are in tests/soak."""


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A checkpoint of one of this file's families; the same options give the same folder."""
    base = tmp_path_factory.mktemp("windows")

    @cache
    def make(options: tuple[tuple[str, Any], ...]) -> Path:
        rest = dict(options)
        return FAMILIES[str(rest.pop("name"))](base / str(len(list(base.iterdir()))), **rest)

    return lambda **options: make(tuple(sorted(options.items())))


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value if key == "name" else key) for key, value in options.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=described)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    family: Family, oracle_of: MakeOracle, options: dict[str, Any]
) -> None:
    folder = family(**options)
    expect_the_oracles(folder, oracle_of(folder), (1, 2, 15, WINDOW - 1, WINDOW, WINDOW + 1, 129, 300, 700))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "attention"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "torch")])
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_hang_on_its_own_sequence_alone(family: Family, name: str, dtype: str, attention: str) -> None:
    experts = {"enable_moe_block": True} if name == "gemma4" else {}
    folder, rng = family(name=name, dtype=dtype, **experts), random.Random(3)
    (tokens,) = prompts(3, 300)
    want = Bench(folder, 16, 1024, attention=attention).forced(tokens, [300])
    for page_tokens, seed in ((1, 1), (16, 2), (64, 3)):
        bench = Bench(folder, page_tokens, 4096, seed, attention=attention)
        at, held, parts = 0, bench.hold(300), []
        while at < 300:
            count = min(300 - at, rng.choice([1, 1, 2, 3, 5, 16, 31, 64, 127]))
            others = prompts(rng.randrange(99), *rng.choices([1, 2, 7, 60], k=rng.randrange(5)))
            company = [bench.hold(len(prompt)) for prompt in others]
            rows = [bench.row(prompt, 0, mine) for prompt, mine in zip(others, company, strict=True)]
            place = rng.randrange(len(rows) + 1)
            rows.insert(place, bench.row(tokens[at : at + count], at, held))
            parts.append(bench.logits(rows)[place])
            for mine in company:
                bench.drop(mine)
            at += count
        assert torch.equal(torch.cat(parts), want), page_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [
    ("gemma3", {}), ("gemma3", {"alone": True}), ("gemma4", {}), ("gemma4", {"enable_moe_block": True}),
    ("gpt_oss", {}), ("gpt_oss", {"packed": True}),
])  # fmt: skip
def test_a_published_folder_gives_the_bits_of_a_saved_one(family: Family, name: str, options: dict[str, Any]) -> None:
    (tokens,) = prompts(4, 2 * WINDOW)
    kept = {key: value for key, value in options.items() if key != "alone"}
    saved, published = family(name=name, **kept), family(name=name, published=True, **options)
    want, got = (Bench(folder, tokens=512).forced(tokens, [len(tokens)]) for folder in (saved, published))
    assert torch.equal(got, want)


@pytest.mark.slow
def test_a_rank_reads_its_part_of_packed_experts_though_it_ends_within_a_group(family: Family) -> None:
    spec = read_model_spec(family(name="gpt_oss", published=True, packed=True))
    experts = [
        Weights(spec, torch.float32, torch.device("cpu"), shard).scope("model.layers.0.mlp.experts.")
        for shard in (Shard(), *(Shard(rank, 4) for rank in range(4)))
    ]
    whole, *parts = (interleaved_expert(each, 3, ExpertSizes(8, 64, 64), each.shard.axis(64)) for each in experts)
    assert isinstance(whole.down_hi, BlockWeight)
    assert isinstance(parts[0].up_nh, BlockWeight)
    assert [part.down_hi.shape[1] for part in parts] == [16] * 4, "half a group of 32"
    assert torch.equal(torch.cat([dense(part.down_hi) for part in parts], 1), dense(whole.down_hi))
    for half in (0, 1):
        rows = [dense(part.up_nh).chunk(2)[half] for part in parts]
        assert torch.equal(torch.cat(rows), dense(whole.up_nh).chunk(2)[half])


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(("name", "options"), [
    ("gemma3", {"hidden_size": 96}), ("gemma4", {"hidden_size": 96}), ("falcon_h1", {"embedding_multiplier": 5.657})
])  # fmt: skip
def test_the_factor_of_an_embedding_in_bfloat16_is_rounded_where_transformers_rounds_it(
    family: Family, oracle_of: MakeOracle, name: str, options: dict[str, Any]
) -> None:
    """Gemma's is, Falcon-H1's isn't; neither number here is one of bfloat16."""
    folder, tokens, given = family(name=name, dtype="bfloat16", **options), torch.arange(300), []
    oracle = oracle_of(folder)
    seen = oracle.model.model.layers[0].register_forward_pre_hook(lambda _, args: given.append(args[0][0]))
    oracle.logits(tokens.tolist())
    seen.remove()
    decoder, nothing = Bench(folder).engine.decoder, cast(ForwardContext, SimpleNamespace(pictured=None))
    decoder.layers, decoder.prepare = [], None
    assert torch.equal(decoder.forward(tokens, nothing), given[0]), "what the first layer is given"


def test_what_published_gemma_3_leaves_out_is_known(family: Family, tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    shutil.copytree(family(name="gemma3", published=True), folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("vocab_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads"):
        del config["text_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(folder)
    assert (spec.vocab_size, spec.context) == (262_208, 131_072)
    assert (spec.config.size("num_attention_heads"), spec.config.size("num_key_value_heads")) == (8, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_layer_keeps_its_own_state_and_the_window_is_at_work(family: Family, name: str) -> None:
    """The other tests of this file mean something only if this holds: a token that every window has left still counts
    through the full layers, and tables of windows begin behind it."""
    bench = Bench(family(name=name), tokens=1024)
    pools = bench.pools.spec.by_name
    assert (pools["full"].kind, pools["window"].kind) == (PoolKind.FULL, PoolKind.WINDOW)
    assert pools["window"].window_tokens == WINDOW
    assert {buffer.layers for pool in pools.values() for buffer in pool.buffers} == {2}
    (tokens,) = prompts(5, 200)
    held = bench.hold(201)
    bench.logits([bench.row(tokens, 0, held)])
    row = bench.row([7], 200, held)
    assert row.tables["window"].first == (200 - WINDOW + 1) // 16 > 0
    (before,) = bench.logits([row])
    for pool, matters in (("window", False), ("full", True)):
        for buffers in bench.views(pool):
            buffers["k"][held.indices[pool][3]] += 1.0  # Positions 48 to 63.
        (after,) = bench.logits([row])
        assert (not torch.equal(after, before)) is matters, pool


def test_numbers_that_cannot_be_are_refused_in_one_line(family: Family, tmp_path: Path) -> None:
    gemma3, gemma4, oss = (family(name=name) for name in NAMES)
    cases: list[tuple[Path, dict[str, object], str]] = [
        (gemma3, {"layer_types": ["sliding_attention"] * 4}, "no layer keeps full attention"),
        (gemma3, {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        (gemma3, {"sliding_window": 0}, "sliding_window must be a positive whole number"),
        (gemma3, {"hidden_activation": "gelu"}, "only gelu_pytorch_tanh is"),
        (gemma3, {"use_bidirectional_attention": True}, "can't generate"),
        (gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (gemma4, {"num_kv_shared_layers": 5}, "no layer"),
        (gemma4, {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "one positive number"),
        (gemma4, {"vocab_size_per_layer_input": 200}, "below vocab_size"),
        (oss, {"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        (oss, {"num_key_value_heads": 3}, "do not divide"),
    ]  # fmt: skip
    for number, (folder, changes, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message) as error:
            read_model(copy_checkpoint(folder, tmp_path / str(number), **changes))
        assert "\n" not in str(error.value)
