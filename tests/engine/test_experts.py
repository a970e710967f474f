"""Routers and experts against transformers' own modules, and what a row's exactness rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, GptOssConfig, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.safetensors_headers import read_headers
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.layers.mlp import GatedMlp, GatedShared, MixtureOfExperts
from twinpool.engine.layers.moe.experts import (
    ChosenSoftmaxRouter,
    ExpertRoutes,
    ExpertSizes,
    RouterRules,
    ScoreRouter,
    SoftmaxRouter,
    TorchExperts,
    clamped_swiglu,
    interleaved_expert,
    relu_squared,
    softmax,
    ungated_expert,
)
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics, RowExactLinear
from twinpool.engine.tensors.shard import WHOLE, Shard
from twinpool.engine.tensors.weight_loader import Weights

HIDDEN, INNER, EXPERTS, TOP_K = 24, 20, 8, 3
SIZES = ExpertSizes(EXPERTS, HIDDEN, INNER)
DIVIDED = (Shard(0, 2), Shard(1, 2), Shard(0, 2, ep=2), Shard(1, 2, ep=2))
"""Two ranks that have half of each expert, and two that have half of the experts."""
HALVES = (slice(0, 2), slice(2, 4))


@dataclass(frozen=True)
class Counting(Numerics):
    """Numerics that note the rows of every product."""

    rows: list[int] = field(default_factory=list)

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        self.rows.append(len(x_mk))
        return super().linear(x_mk, linear)


def context(count: int, numerics: Numerics = FAST) -> ForwardContext:
    """A step of `count` tokens without state."""
    positions = torch.zeros(numerics.padded(count), dtype=torch.int64)
    return ForwardContext(numerics, TorchAttention(numerics), positions, 1, count, {}, {}, {})


def written(folder: Path, tensors: Mapping[str, Tensor], shard: Shard = WHOLE) -> Weights:
    """A folder with these tensors alone, as one rank reads it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = JsonFields(folder / "config.json", {})
    spec = ModelSpec(
        folder, "x", "x", 1, 1, 1, "float32", None, (), "x", config=config, headers=read_headers(folder)
    )  # fmt: skip
    return Weights(spec, torch.float32, torch.device("cpu"), shard)


def spread(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(tensor.numel()))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(module: nn.Module) -> dict[str, Tensor]:
    """Its tensors with the experts as they are published."""
    tensors = dict(module.state_dict())
    gate_up, down = tensors.pop("experts.gate_up_proj"), tensors.pop("experts.down_proj")
    for number in range(len(gate_up)):
        gate, up = gate_up[number].chunk(2)
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[number])):
            tensors[f"experts.{number}.{name}.weight"] = tensor
    return tensors


@pytest.mark.slow
@torch.inference_mode()
def test_deepseeks_groups_correction_scaling_and_shared_expert(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        n_shared_experts=1, hidden_act="silu",
    )  # fmt: skip
    theirs = DeepseekV3MoE(config)
    spread(theirs)
    weights = written(tmp_path, one_by_one(theirs))
    router = ScoreRouter(weights, SIZES, TOP_K, RouterRules(groups=4, top_groups=2, scale=2.5))
    shared = GatedMlp(weights.scope("shared_experts."), HIDDEN, INNER)
    ours = MixtureOfExperts(weights, router, SIZES, shared=shared)
    x = draw(50, HIDDEN)
    torch.testing.assert_close(ours(x, context(50)), theirs(x[None])[0], rtol=1e-5, atol=1e-5)
    in_reach = router(x, context(50)).experts_mk // 2
    assert max(len(set(row)) for row in in_reach.tolist()) <= 2, "experts of two groups only"
    free = ScoreRouter(weights, SIZES, TOP_K, RouterRules(scale=2.5))(x, context(50))
    assert not torch.equal(free.experts_mk.sort(-1).values // 2, in_reach.sort(-1).values)
    with pytest.raises(CheckpointError, match="3 groups"):
        ScoreRouter(weights, SIZES, TOP_K, RouterRules(groups=3, top_groups=2))


@pytest.mark.slow
@torch.inference_mode()
def test_gpt_oss_experts_take_turns_are_clamped_and_have_biases(tmp_path: Path) -> None:
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    theirs = GptOssMLP(config)
    spread(theirs)
    activation = clamped_swiglu(limit=7.0, alpha=1.702)
    x = draw(50, HIDDEN) * 5
    want = theirs(x[None])[0][0]
    parts = []
    for shard in (WHOLE, *DIVIDED):
        weights = written(tmp_path, theirs.state_dict(), shard)
        router = ChosenSoftmaxRouter(weights, SIZES, TOP_K)
        ours = MixtureOfExperts(weights, router, SIZES, read=interleaved_expert, activation=activation)
        parts.append(ours(x, context(50)))
    for together in (parts[0], parts[1] + parts[2], parts[3] + parts[4]):
        torch.testing.assert_close(together, want, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@torch.inference_mode()
def test_qwens_shared_expert_is_gated_and_fused_tensors_split_between_ranks(tmp_path: Path) -> None:
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, shared_expert_intermediate_size=16, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True,
    )  # fmt: skip
    theirs = Qwen3NextSparseMoeBlock(config)
    spread(theirs)
    x = draw(50, HIDDEN)
    want = theirs(x[None])[0]
    parts = []
    for shard in (WHOLE, *DIVIDED):
        weights = written(tmp_path, theirs.state_dict(), shard)
        router = SoftmaxRouter(weights, SIZES, TOP_K, normalise=True)
        shared = GatedShared(weights, HIDDEN, GatedMlp(weights.scope("shared_expert."), HIDDEN, 16))
        parts.append(MixtureOfExperts(weights, router, SIZES, shared=shared)(x, context(50)))
    for together in (parts[0], parts[1] + parts[2], parts[3] + parts[4]):
        torch.testing.assert_close(together, want, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_experts_without_a_gate_are_read_in_both_layouts(tmp_path: Path) -> None:
    up, down = draw(EXPERTS, INNER, HIDDEN, seed=1), draw(EXPERTS, HIDDEN, INNER, seed=2)
    gate = {"gate.weight": draw(EXPERTS, HIDDEN)}
    fused = gate | {"experts.up_proj": up, "experts.down_proj": down}
    single = gate | {
        f"experts.{e}.{n}.weight": t[e] for e in range(EXPERTS) for n, t in (("up_proj", up), ("down_proj", down))
    }
    x = draw(9, HIDDEN, seed=3)
    got = []
    for number, tensors in enumerate((fused, single)):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = written(folder, tensors)
        router = SoftmaxRouter(weights, SIZES, TOP_K, normalise=False)
        moe = MixtureOfExperts(weights, router, SIZES, read=ungated_expert, activation=relu_squared)
        got.append(moe(x, context(9)))
        routes = router(x, context(9))
    assert torch.equal(got[0], got[1])
    all_th = torch.einsum("ehi,eti->eth", down, torch.einsum("eih,th->eti", up, x).relu().square())
    want = sum(routes.weights_mk[:, k, None] * all_th[routes.experts_mk[:, k], torch.arange(9)] for k in range(TOP_K))
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-3)


def experts_of(count: int) -> tuple[TorchExperts, list[RowExactLinear]]:
    ups = [RowExactLinear(draw(INNER, HIDDEN, seed=e)) for e in range(count)]
    downs = [RowExactLinear(draw(HIDDEN, INNER, seed=50 + e)) for e in range(count)]
    return TorchExperts(ups, downs, relu_squared), ups


def routes(rows: int, count: int, top_k: int, seed: int = 0) -> ExpertRoutes:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(rows)])
    return ExpertRoutes(chosen, torch.rand(rows, top_k, generator=generator))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_expert_is_some_ranks_or_they_cannot_be_spread(ranks: int) -> None:
    for count in range(ranks, 13):
        shards = [Shard(rank, ranks, ranks) for rank in range(ranks)]
        if count % ranks:
            for shard in shards:
                with pytest.raises(ConfigError, match=f"doesn't divide the {count} experts"):
                    shard.experts(count)
        else:
            assert sorted(expert for shard in shards for expert in shard.experts(count)) == [*range(count)]


@torch.inference_mode()
def test_experts_that_are_spread_are_read_by_one_rank_each_and_a_row_without_any_of_its_own_is_zero() -> None:
    """A row of another rank's experts has nothing of rows that are not finite, either."""
    experts, ups = experts_of(4)
    downs = [RowExactLinear(draw(HIDDEN, INNER, seed=50 + e)) for e in range(4)]
    first, second = (TorchExperts(ups[here], downs[here], relu_squared) for here in HALVES)
    x, all_of_them = draw(3, HIDDEN, seed=9), torch.tensor([[0, 1], [3, 0], [3, 2]])
    x[0] = torch.inf
    sent = ExpertRoutes(all_of_them, torch.rand(3, 2))
    parts = [half(x, sent.of(range(4)[here]), FAST) for half, here in zip((first, second), HALVES, strict=True)]
    assert torch.equal(parts[0][2], torch.zeros(HIDDEN))
    assert torch.equal(parts[1][0], torch.zeros(HIDDEN))
    torch.testing.assert_close((parts[0] + parts[1])[1:], experts(x, sent, FAST)[1:])
    nowhere = ExpertRoutes(all_of_them[2:], torch.rand(1, 2)).of(range(2))
    assert torch.equal(first(x[2:], nowhere, FAST), torch.zeros(1, HIDDEN)), "a step of which it has no row"


@torch.inference_mode()
def test_only_chosen_experts_are_computed_and_always_in_whole_quanta() -> None:
    experts, _ = experts_of(EXPERTS)
    for rows, top_k in ((1, 1), (1, EXPERTS), (7, 3), (33, 2)):
        numerics, sent = Counting(4), routes(rows, EXPERTS, top_k)
        experts(draw(rows, HIDDEN), sent, numerics)
        assert len(numerics.rows) == 2 * len(sent.experts_mk.unique()), "two products an expert that has rows"  # type: ignore[no-untyped-call]
        assert not any(count % 4 for count in numerics.rows), "the rows of every product are whole quanta"


@torch.inference_mode()
def test_a_row_adds_its_experts_up_in_one_order_whatever_the_router_listed_first() -> None:
    experts, _ = experts_of(EXPERTS)
    x, sent = draw(12, HIDDEN), routes(12, EXPERTS, 5)
    want = experts(x, sent, Numerics(4))
    turn = torch.tensor([3, 0, 4, 1, 2])
    got = experts(x, ExpertRoutes(sent.experts_mk[:, turn], sent.weights_mk[:, turn]), Numerics(4))
    assert torch.equal(got, want)
    for row in range(12):
        alone = experts(
            x[row : row + 1], ExpertRoutes(sent.experts_mk[row : row + 1], sent.weights_mk[row : row + 1]), Numerics(4)
        )
        assert torch.equal(alone[0], want[row])


@pytest.mark.slow
@torch.inference_mode()
def test_routers_give_a_row_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Odd numbers of experts leave tails behind every vector lane."""
    count, width = 37, 45
    tensors = {"gate.weight": draw(count, width), "router.weight": draw(count, width, seed=1)}
    tensors |= {"router.bias": draw(count, seed=2), "gate.e_score_correction_bias": draw(count, seed=3)}
    weights = written(tmp_path, tensors)
    x, sizes = draw(64, width, seed=4), ExpertSizes(count, width, 1)
    for router in (
        SoftmaxRouter(weights, sizes, 5, normalise=True),
        ChosenSoftmaxRouter(weights, sizes, 5),
        ScoreRouter(weights, sizes, 5, RouterRules(scale=1.5)),
        ScoreRouter(weights, sizes, 5, RouterRules(softmax, normalise=False), correction=""),
    ):
        want = router(x, context(64, Numerics(4)))
        for rows in (4, 8, 12, 20, 36, 60):
            for begin in (0, 64 - rows):
                got = router(x[begin : begin + rows].clone(), context(rows, Numerics(4)))
                assert torch.equal(got.experts_mk, want.experts_mk[begin : begin + rows])
                assert torch.equal(got.weights_mk, want.weights_mk[begin : begin + rows])
