"""Models that the package transformers computes (`engine.models: transformers`), with attention over our pages.

The module of transformers computes embeddings, norms, projections, experts and logits. Its attention goes through
transformers' attention interface to a function of ours, which writes the step's keys and values into pages and attends
over block tables; all rows of a step are one sequence to the module, each with its own position. So an architecture
needs no file here: what its layers keep is found by a trace (`engine.models.transformers_trace`), and a model that asks
for anything else than attention to keys and values of earlier positions is refused then, by name, before a weight is
read.

Rows are as exact as in the models of this package where the trace finds only operations by row: products with weights
are those of `row_exact_linear`, experts those of `engine.layers.moe`, and activations whose lanes round differently are
computed as `engine.layers.norm` does. Anything else needs `engine.numerics=fast`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolKind, PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS
from twinpool.engine.attention.kv_quantization import kv_scales, store, with_scales
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer, LayerPlace, unchanged
from twinpool.engine.layers.moe.experts import ExpertRoutes, TorchExperts
from twinpool.engine.models.model_base import FULL_POOL, WINDOW_POOL, Model, StateOptions
from twinpool.engine.models.transformers_trace import (
    META,
    NAME,
    AttentionCall,
    ModuleHost,
    config_of,
    flat_mask,
    host,
    hosted_by,
    read_options,
    registered,
    traced,
)
from twinpool.engine.native.current_kernels import in_use, using
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights


class TransformersModel(Model):
    """A decoder of transformers, of the numbers of one checkpoint. Raises `CheckpointError` for what can't be computed
    so, `ConfigError` without the package."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        if spec.draft_model:
            raise ConfigError("engine.models=transformers has no draft layers: leave engine.draft_model empty")
        if spec.pictures is not None:
            raise ConfigError("engine.models=transformers computes no pictures: set engine.models=native")
        super().__init__(spec)
        if spec.path.is_file():
            raise spec.config.refuse("engine.models=transformers takes folders, no GGUF files")
        if spec.quantization.method:
            raise spec.config.refuse(
                f"engine.models=transformers takes dense weights, and these are quantised ({spec.quantization.method})"
            )
        if config.device.startswith("cuda"):
            raise ConfigError("engine.models=transformers computes on CPUs: set engine.device=cpu")
        if config.weights in ("int8", "int4"):
            raise ConfigError(
                f"engine.models=transformers keeps weights as stored, not engine.weights={config.weights}"
            )
        registered()
        self.trace = traced(spec.config.path, json.dumps(spec.config.values, default=str), spec.context)
        self.calls = {call.layer: call for call in self.trace.calls}
        if config.numerics == "invariant" and self.trace.inexact:
            raise ConfigError(
                f"{spec.config.path}: under engine.models=transformers its {', '.join(self.trace.inexact)} may give a "
                "row other bits in another batch: set engine.numerics=fast"
            )

    def place(self, layer: int) -> LayerPlace:
        """The place of a layer's keys and values. Those of windows are in a pool of their own, but where all layers
        have one."""
        calls, mine = self.trace.calls, self.calls[layer]
        apart = len({bool(call.window) for call in calls}) > 1
        before = [
            call for call in calls if call.layer < layer and (not apart or bool(call.window) == bool(mine.window))
        ]
        return LayerPlace(WINDOW_POOL if apart and mine.window else FULL_POOL, len(before))

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        if options.shard.size > 1:
            raise ConfigError("engine.models=transformers computes on one rank, not on several")
        by_pool: dict[str, list[AttentionCall]] = {}
        for call in self.trace.calls:
            by_pool.setdefault(self.place(call.layer).pool, []).append(call)
        pools = []
        for name, calls in sorted(by_pool.items()):
            shapes = {(call.kv_heads, call.key_dim, call.value_dim) for call in calls}
            if len(shapes) > 1:
                raise self.config.refuse(f"layers of one kind keep keys and values of {len(shapes)} shapes")
            heads, key_dim, value_dim = shapes.pop()
            plain = tuple(
                BufferSpec(buffer, len(calls), (heads, dim), options.dtype, heads=heads)
                for buffer, dim in (("k", key_dim), ("v", value_dim))
            )
            kind = PoolKind.WINDOW if name == WINDOW_POOL else PoolKind.FULL
            window = max(call.window for call in calls) if name == WINDOW_POOL else 0
            pools.append(PoolSpec(name, with_scales(plain, options.kv_codes), kind, window))
        return tuple(pools)

    def layer(self, number: int, weights: Weights) -> Layer:
        raise AssertionError("a module has its own layers")

    def build(self, weights: Weights) -> Decoder:
        if weights.shard.size > 1:
            raise ConfigError("engine.models=transformers computes on one rank, not on several")
        if weights.device.type == "cuda":
            raise ConfigError("engine.models=transformers computes on CPUs: set engine.device=cpu")
        if weights.device == META:
            return self._planned(weights)
        module = self._loaded(weights.dtype)
        for call in () if in_use() else self.trace.calls:
            for k, n in ((call.key_dim, BLOCK_TOKENS), (BLOCK_TOKENS, call.value_dim)):
                weights.products.extend((batch, k, n) for batch in (call.kv_heads, 5 * call.kv_heads))
        embed = module.get_input_embeddings().weight.detach()
        with torch.inference_mode():
            _replace(module, weights)
        head = module.get_output_embeddings()
        assert isinstance(head, _Product), "the head is a product"
        _try_out(module, self.calls, self.spec)
        places = {layer: self.place(layer) for layer in self.calls}
        dense = self.dense_modules(weights)
        return ModuleDecoder(
            embed, (), unchanged, head.linear, dense=dense, module=module, calls=self.calls, places=places
        )

    def _planned(self, weights: Weights) -> Decoder:
        """Ask for the tensors, none of which is read; those that transformers puts together from others are counted."""
        for name, shape in self.trace.parameters.items():
            if weights.has(name) or not weights.spec.headers:
                weights.tensor(name, *shape)
            else:
                weights.counted(torch.empty(shape, dtype=weights.dtype, device=META))
        table = torch.empty(self.trace.embedding, dtype=weights.dtype, device=META)
        if self.trace.tied:
            weights.tied_head(table)
        self.dense_modules(weights)
        return ModuleDecoder(table, (), unchanged, RowExactLinear(table))

    def _loaded(self, dtype: torch.dtype) -> Any:
        transformers = registered()
        try:
            module, told = transformers.AutoModelForCausalLM.from_pretrained(
                self.spec.path,
                config=config_of(self.spec.config.path),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.spec.path}: transformers can't load it: {error}") from None
        lacking = sorted({*told["missing_keys"], *(str(each) for each in told["mismatched_keys"])})
        if lacking:
            raise CheckpointError(f"{self.spec.path}: tensor {lacking[0]} is missing, or of another shape")
        return module.eval()


class _Product(nn.Module):
    """A product with a weight, in place of a linear layer."""

    def __init__(self, linear: RowExactLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        numerics, rows_mk = host().numerics, x.reshape(-1, x.shape[-1])
        count = len(rows_mk)
        lacking = numerics.padded(count) - count
        if lacking:
            rows_mk = torch.cat((rows_mk, rows_mk.new_zeros(lacking, rows_mk.shape[1])))
        return numerics.linear(rows_mk, self.linear)[:count].view(*x.shape[:-1], -1)


_TRIED_ROWS = (5, 1, 5)
_CLOSE = {torch.float32: 0.01, torch.bfloat16: 0.1}
"""How far a row of hidden states may be from another computation's, of its length."""


@torch.inference_mode()
def _try_out(module: Any, calls: Mapping[int, AttentionCall], spec: ModelSpec) -> None:
    """Compute a short text in pieces, and whole by the module's own attention. Raises `CheckpointError` where they
    differ: then the module does something that its trace doesn't show."""
    count = sum(_TRIED_ROWS)
    tokens_t, positions_t = (7919 * torch.arange(1, count + 1)) % spec.vocab_size, torch.arange(count)
    tried, parts = _Trial(FAST, calls), []
    pieces = (torch.split(each, list(_TRIED_ROWS)) for each in (tokens_t, positions_t))
    for part_t, at_t in zip(*pieces, strict=True):
        parts.append(_hidden(module, part_t, at_t, tried))
    module.config._attn_implementation = "eager"
    try:
        whole_th = _hidden(module, tokens_t, positions_t, tried)
    finally:
        module.config._attn_implementation = NAME
    off_t = (torch.cat(parts) - whole_th).float().norm(dim=1) / whole_th.float().norm(dim=1)
    # In bfloat16 a last bit may send a token to other experts.
    off = off_t.max() if whole_th.dtype == torch.float32 else off_t.median()
    if not off <= _CLOSE.get(whole_th.dtype, 0.1):
        raise CheckpointError(
            f"{spec.path}: engine.models=transformers can't compute this model: in pieces, its results are off by "
            f"{float(off):.0%} from those of its own attention, so it keeps more than keys and values"
        )


def _hidden(module: Any, tokens_m: Tensor, positions_m: Tensor, answers: ModuleHost) -> Tensor:
    """The last hidden states of rows at these positions, [M, hidden]."""
    with hosted_by(answers):
        out = module.base_model(
            input_ids=tokens_m[None],
            position_ids=positions_m[None],
            attention_mask=torch.ones_like(tokens_m)[None],
            use_cache=False,
        )
    last_mh: Tensor = out.last_hidden_state[0]
    return last_mh


@dataclass
class _Trial:
    """Answers a module that is tried out: keys and values are kept as they came."""

    numerics: Numerics
    calls: Mapping[int, AttentionCall]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def mask(self, rows: int, visible: Callable[..., Any], device: torch.device) -> Tensor:
        return flat_mask(rows, device)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer in self.kept:
            k, v = (torch.cat(each, 2) for each in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        scores, window, group = read_options(q, layer, options), self.calls[layer].window, q.shape[1] // k.shape[1]
        key_t, at_m1 = torch.arange(k.shape[2]), torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        hidden_mt = (key_t > at_m1) | (key_t <= at_m1 - window if window else torch.tensor(False))
        k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
        products = q.float() @ k.transpose(2, 3) * scores.scale
        if scores.softcap:
            products = torch.tanh(products / scores.softcap) * scores.softcap
        products = products.masked_fill(hidden_mt, -torch.inf)
        if scores.sinks_h is not None:
            sinks = scores.sinks_h[None, :, None, None].expand(1, -1, q.shape[2], 1)
            products = torch.cat((products, sinks), -1)
        weights = products.softmax(-1)[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2).contiguous().to(q.dtype)

    def experts(self, module: Any, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
        return _routed(module, h_th, experts_tk, weights_tk, self.numerics)


def _routed(experts: Any, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor, numerics: Numerics) -> Tensor:
    out_th: Tensor = experts.routed(h_th, ExpertRoutes(experts_tk, weights_tk.float()), numerics)
    return out_th.to(h_th.dtype)


def _replace(module: nn.Module, weights: Weights) -> None:
    """Put products of our own in place of a module's linear layers and experts, whose weights are freed."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            held: Any = child
            bias = None if held.bias is None else held.bias.detach()
            setattr(module, name, _Product(weights.made(held.weight.detach(), bias_n=bias)))
            held.weight = held.bias = None
            continue
        _replace(child, weights)
        if hasattr(child, "is_concatenated") and hasattr(child, "has_gate"):  # As transformers marks experts.
            _replace_experts(child, weights)


def _replace_experts(experts: Any, weights: Weights) -> None:
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"

    def products(name: str) -> list[RowExactLinear]:
        stacked, biases = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
        made = []
        for number, weight in enumerate(stacked):
            bias = biases[number].detach() if experts.has_bias and biases is not None else None
            made.append(weights.made((weight.T if experts.is_transposed else weight).contiguous(), bias_n=bias))
        setattr(experts, name, None)
        return made

    experts.routed = TorchExperts(products(up_name), products("down_proj"), partial(_activated, experts=experts))


def _activated(up_sn: Tensor, experts: Any) -> Tensor:
    out_si: Tensor = (experts._apply_gate if experts.has_gate else experts.act_fn)(up_sn)
    return out_si


@dataclass
class ModuleDecoder(Decoder):
    """A module of transformers as a decoder: what it is asked for goes to the step's pages."""

    module: Any = None
    calls: Mapping[int, AttentionCall] = field(default_factory=dict)
    places: Mapping[int, LayerPlace] = field(default_factory=dict)

    def forward(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        registered()
        with using(self.kernels):
            return _hidden(self.module, tokens_m, ctx.positions_m, _Step(ctx.numerics, ctx, self))

    def logits(self, x_nh: Tensor, numerics: Numerics) -> Tensor:
        """As `Decoder.logits`: by the module's own forward pass, in which its base gives these rows."""
        name, base = self.module.base_model_prefix, self.module.base_model
        self.module._modules[name] = _Given(x_nh[None])
        try:
            with using(self.kernels), hosted_by(_Step(numerics, None, self)):
                rows = torch.zeros(1, len(x_nh), dtype=torch.long, device=x_nh.device)
                logits_nv: Tensor = self.module(input_ids=rows, use_cache=False).logits[0]
        finally:
            self.module._modules[name] = base
        return logits_nv.float()


class _Given:
    """Stands for the base of a module whose result is known, and for what modules call within their base."""

    def __init__(self, x_1nh: Tensor) -> None:
        self._x_1nh = x_1nh

    def __call__(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(self._x_1nh)

    def __getattr__(self, name: str) -> _Given:
        return self


class _Hidden:
    """The result of a base, in which there is nothing but hidden states."""

    def __init__(self, x_1nh: Tensor) -> None:
        self.last_hidden_state = x_1nh

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        return None


@dataclass
class _Step:
    """Answers a module that computes a step, or logits (then there is no `ctx`)."""

    numerics: Numerics
    ctx: ForwardContext | None
    decoder: ModuleDecoder

    def mask(self, rows: int, visible: Callable[..., Any], device: torch.device) -> Tensor:
        return flat_mask(rows, device)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        ctx = self.ctx
        assert ctx is not None, "logits need no attention"
        layer: int = module.layer_idx  # type: ignore[assignment]
        place = self.decoder.places[layer]
        plan, buffers = ctx.plans[place.pool], ctx.buffers(place)
        q_thd, k_tgd, v_tgd = (x[0].transpose(0, 1)[: ctx.count].to(self.decoder.dtype) for x in (q, k, v))
        store(buffers, "k", k_tgd, plan)
        store(buffers, "v", v_tgd, plan)
        found = read_options(q, layer, options)
        scores = ScoreOptions(found.scale, self.decoder.calls[layer].window, found.softcap, found.sinks_h)
        out_thd = ctx.attention.attend(q_thd, buffers["k"], buffers["v"], plan, scores, kv_scales(buffers))
        if ctx.passed is not None:
            ctx.passed()
        return ctx.padded(out_thd)[None].to(q.dtype)

    def experts(self, module: Any, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
        return _routed(module, h_th, experts_tk, weights_tk, self.numerics)
