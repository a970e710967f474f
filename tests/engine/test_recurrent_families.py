"""Models with recurrent layers against transformers, and the promise of exactness over chunks and batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, Held, MakeOracle
from tests.support.checkpoints import VOCAB, Oracle, compare, compare_forced, copy_checkpoint
from tests.support.model_families import FAMILIES
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.attention.attention_backend import BLOCK
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.tensors.shard import Shard

Family = Callable[..., Path]
NAMES = ("qwen3_next", "qwen3_5", "falcon_h1", "nemotron_h")
LENGTHS = (1, 3, 16, 65, 300)
LATER = pytest.mark.soak
CHANGES: list[dict[str, Any]] = [
    {"name": "qwen3_next", "mlp_only_layers": [0, 1, 2, 3], "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    {"name": "qwen3_5", "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 18},
    {
        "name": "qwen3_5",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    {"name": "falcon_h1", "mamba_rms_norm": False, "mamba_n_groups": 1, "tie_word_embeddings": True},
    {"name": "falcon_h1", "mamba_norm_before_gate": True, "mamba_proj_bias": True, "projectors_bias": True},
    {"name": "nemotron_h", "n_group": 2, "topk_group": 1, "use_bias": True, "mlp_bias": True},
]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A checkpoint of one of this file's families; the same options give the same folder."""
    base = tmp_path_factory.mktemp("recurrent")

    @cache
    def make(options: tuple[tuple[str, Any], ...]) -> Path:
        rest: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in options}
        return FAMILIES[str(rest.pop("name"))](base / str(len(list(base.iterdir()))), **rest)

    return lambda **options: make(
        tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(options.items()))
    )


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value if key == "name" else key) for key, value in options.items())


def chunks(rng: random.Random, length: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < length:
        count = min(length - at, rng.choice([1, 1, 2, 3, 5, 15, 16, 17, 31, 64, 127]))
        yield at, count
        at += count


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [*({"name": name} for name in NAMES), *(pytest.param(c, marks=LATER) for c in CHANGES)], ids=described
)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    family: Family, oracle_of: MakeOracle, options: dict[str, Any]
) -> None:
    folder = family(**options)
    oracle, bench = oracle_of(folder), Bench(folder)
    asked = prompts(1, *LENGTHS)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk=64), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, verdict
    logits, truth = bench.forced(asked[-1], [100, 1, 199]), Oracle(folder, "float64").logits(asked[-1])
    error = (oracle.logits(asked[-1]) - truth).abs().max()
    assert (logits - truth).abs().max() <= 4 * error, "about as near to float64 as the oracle in float32 is"


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_chooses_within_the_oracles_own_difference(family: Family, oracle_of: MakeOracle, name: str) -> None:
    folder = family(name=name, dtype="bfloat16")
    oracle, bench = oracle_of(folder), Bench(folder)
    for prompt in prompts(2, 17, 300):
        tokens = prompt + oracle.generate(prompt, 8)
        got = bench.forced(tokens, [len(prompt), *[1] * 8])
        verdict = compare_forced(oracle, tokens, got.argmax(-1).tolist())
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_as_published_gives_what_one_saved_by_transformers_gives(family: Family, name: str) -> None:
    (tokens,) = prompts(3, 150)
    got, want = (Bench(family(name=name, **kind)).forced(tokens, [150]) for kind in ({"published": True}, {}))
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("float32", "auto"),
        pytest.param("bfloat16", "auto", marks=LATER),
        pytest.param("float32", "torch", marks=LATER),
    ],
)
@pytest.mark.parametrize("name", [*NAMES[::2], *(pytest.param(name, marks=LATER) for name in NAMES[1::2])])
def test_a_rows_bits_hang_on_its_own_sequence_alone(family: Family, name: str, dtype: str, backend: str) -> None:
    folder, rng = family(name=name, dtype=dtype), random.Random(3)
    (tokens,) = prompts(4, 300)
    want = Bench(folder, 16, 1024, attention=backend).forced(tokens, [300])
    for page_tokens, seed in ((1, 1), (16, 2), (64, 3)):
        bench = Bench(folder, page_tokens, 8192, seed, attention=backend)
        held, parts = bench.hold(300), []
        for at, count in chunks(rng, 300):
            others = prompts(rng.randrange(99), *rng.choices([1, 2, 7, 16, 40], k=rng.randrange(5)))
            rows = [bench.row(prompt, 0, bench.hold(len(prompt))) for prompt in others]
            place = rng.randrange(len(rows) + 1)
            rows.insert(place, bench.row(tokens[at : at + count], at, held))
            parts.append(bench.logits(rows)[place])
        assert torch.equal(torch.cat(parts), want), page_tokens


def slot(bench: Bench, held: Held) -> list[Tensor]:
    return [view[held.indices["state"][0]].clone() for buffers in bench.views("state") for view in buffers.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_slot_are_a_function_of_the_tokens(family: Family, name: str) -> None:
    """What a hand-over sends and the tree keeps: the same wherever chunks ended, and zeros where nothing is yet."""
    bench, rng = Bench(family(name=name), 16, 8192), random.Random(5)
    for length in (5, 48, 77):
        (tokens,) = prompts(6, length)
        whole, cut = bench.hold(length), bench.hold(length)
        bench.logits([bench.row(tokens, 0, whole)])
        for at, count in chunks(rng, length):
            bench.logits([bench.row(tokens[at : at + count], at, cut)])
        assert all(torch.equal(a, b) for a, b in zip(slot(bench, whole), slot(bench, cut), strict=True))
        for buffers in bench.views("state"):
            for buffer, view in buffers.items():
                left = view[whole.indices["state"][0]][:, length % BLOCK :]
                assert not buffer.startswith("block") or not left.any(), buffer
    for buffers in bench.views("state"):
        assert not any(view[0].any() for view in buffers.values()), "the null slot stays zero"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_buffer_of_the_state_counts(family: Family, name: str) -> None:
    """The tests above mean something only if this holds: what a chunk leaves reaches the next one by each buffer."""
    bench = Bench(family(name=name), 16, 4096)
    (tokens,) = prompts(7, 61)
    want = bench.forced(tokens, [60, 1])[-1]
    for number in range(len(bench.pools.layout.buffers["state"])):
        held = bench.hold(61)
        bench.logits([bench.row(tokens[:60], 0, held)])
        views = [list(buffers.values())[number] for buffers in bench.views("state")]
        for view in views:
            mine = view[held.indices["state"][0]]
            mine[:, 0] += torch.randn(mine[:, 0].shape)
        (got,) = bench.logits([bench.row(tokens[60:], 60, held)])
        assert (got[-1] - want).abs().max() > 0.01, bench.pools.layout.buffers["state"][number].spec.name


def test_stale_sequences_leave_the_null_slot_zero_and_others_alone(family: Family) -> None:
    bench = Bench(family(name="qwen3_5"), 16, 1024)
    asked = prompts(9, 40, 25)
    held = [bench.hold(40), bench.hold(25)]
    before = slot(bench, held[1])
    epochs = bench.engine._epochs["state"]
    epochs.bump(held[1].indices["state"])
    bench.engine.forward([bench.row(prompt, 0, mine) for prompt, mine in zip(asked, held, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(slot(bench, held[1]), before, strict=True))
    alone = bench.hold(40)
    bench.logits([bench.row(asked[0], 0, alone)])
    assert all(torch.equal(a, b) for a, b in zip(slot(bench, held[0]), slot(bench, alone), strict=True))
    for buffers in bench.views("state"):
        assert not any(view[0].any() for view in buffers.values())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("qwen3_next", {"linear_num_value_heads": 3}, "3 value heads do not divide among 2 key heads"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "no layer is of type linear_attention"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be 2 or more"),
        ("qwen3_5", {"linear_key_head_dim": 8}, "in_proj_qkv.weight has shape"),
        ("falcon_h1", {"mamba_n_groups": 3}, "4 Mamba heads do not divide among 3 groups"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MEX-*"}, "kinds of 5 layers"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "only relu2"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    family: Family, tmp_path: Path, name: str, change: dict[str, Any], says: str
) -> None:
    folder = copy_checkpoint(family(name=name), tmp_path / "model", **change)
    with pytest.raises(CheckpointError, match=says):
        read_model(folder)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_state_in_slices_that_add_up_to_the_whole(family: Family, name: str) -> None:
    model = read_model(family(name=name))
    whole = model.pool_set(StateOptions(torch.float32, 16))
    for size in (2, 4):
        ranks = [model.pool_set(StateOptions(torch.float32, 16, Shard(rank, size))) for rank in range(size)]
        for spec in ranks:
            assert spec.whole == whole
        for pool in whole.pools:
            for number, buffer in enumerate(pool.buffers):
                parts = [spec.by_name[pool.name].buffers[number] for spec in ranks]
                covered = {head for part in parts for head in range(part.first_head, part.first_head + part.shape[0])}
                assert covered == set(range(buffer.shape[0])), buffer.name
