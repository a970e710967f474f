"""EAGLE-3 heads: a folder of their own, with one layer that drafts for a model that it was trained on."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import FEATURES, LayerPlace, Norm
from twinpool.engine.layers.draft_layers import DRAFT_POOL, OWN, Eagle3Layer
from twinpool.engine.layers.mixers.head_attention import HeadAttention, kv_buffers
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_BELOW = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
"""What the names of the layer's tensors begin with, in the first training code and in later ones."""


class Eagle3:
    """The head of one folder, for one model. Raises `CheckpointError` where it isn't one, or for another model."""

    def __init__(self, model: ModelSpec, spec: ModelSpec, hidden: int) -> None:
        """`hidden`: the model's."""
        config = spec.config
        if spec.architecture not in ARCHITECTURES:
            raise config.refuse(
                f"engine.draft_model names a folder with architecture {spec.architecture}; supported are "
                f"{', '.join(ARCHITECTURES)}, and mtp"
            )
        self.spec, self._model, self._tapped = spec, model, hidden
        self.width = config.size("hidden_size")
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", self.width // self.heads)
        self.vocab = config.size("draft_vocab_size", spec.vocab_size)
        self.eps = config.number("rms_norm_eps", 1e-6)
        self.rope = read_rope(config, context=model.context)
        if spec.vocab_size != model.vocab_size:
            raise config.refuse(
                f"its vocabulary has {spec.vocab_size} tokens, that of {model.name} has {model.vocab_size}: this head "
                "was trained for another model"
            )
        self.taps = self._taps()
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")

    def _taps(self) -> tuple[int, ...]:
        """The layers of the model whose inputs are read: those that the head says, else an early, a middle and a late
        one, as in the paper's code."""
        config, layers = self.spec.config, self._model.layers
        key = "eagle_aux_hidden_state_layer_ids"
        given = config.values.get(key, config.table("eagle_config").get(key))
        taps = given if isinstance(given, list) else [2, layers // 2, layers - 3]
        if len(set(taps)) != len(taps) or not all(isinstance(tap, int) and 0 <= tap < layers for tap in taps):
            raise config.refuse(f"the inputs of layers {taps} are read, and {self._model.name} has {layers} layers")
        return tuple(sorted(taps))

    def buffers(self, dtype: torch.dtype, shard: Shard, codes: torch.dtype | None) -> tuple[BufferSpec, ...]:
        """Features, keys and values, as one rank holds them."""
        own = kv_buffers(1, self.kv_heads, self.head_dim, dtype, shard, codes)
        named = (BufferSpec(OWN + b.name, b.layers, b.shape, b.dtype, b.index, b.heads, b.first_head) for b in own)
        return (*named, BufferSpec(FEATURES, 1, (self.width,), dtype))

    def build(self, weights: Weights, pool: str) -> Eagle3Layer:
        """Build the layer, whose tensors are those of `weights`, and whose features are kept in `pool`."""
        config, width = self.spec.config, self.width
        below = next((name for name in _BELOW if weights.has(f"{name}hidden_norm.weight")), _BELOW[0])
        root = weights.scope("model.") if below.startswith("model.") else weights
        layer = weights.scope(below)
        rope = weights.once("rope of the draft layer", lambda: self._rope_table(weights))
        attention = HeadAttention(
            layer.scope("self_attn."),
            LayerPlace(DRAFT_POOL, 0),
            rope,
            hidden=width,
            inputs=2 * width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=config.flag("attention_bias"),
        )
        own_embed = root.has("embed_tokens.weight")
        if not own_embed and width != self._tapped:
            raise config.refuse(f"hidden_size {width} isn't the model's, {self._tapped}, and there is no embedding")
        return Eagle3Layer(
            pool,
            weights.linear({"lm_head": self.vocab}, width),
            root.tensor("embed_tokens.weight", self.spec.vocab_size, width) if own_embed else None,
            self._tokens(weights) if weights.has("d2t") else None,
            self.taps,
            joined=root.linear({"fc": width}, len(self.taps) * self._tapped),
            token_norm=self._norm(layer, "input_layernorm"),
            feature_norm=self._norm(layer, "hidden_norm"),
            attention=attention,
            mlp_norm=self._norm(layer, "post_attention_layernorm"),
            mlp=GatedMlp(layer.scope("mlp."), width, config.size("intermediate_size")),
            norm=self._norm(root, "norm"),
        )

    def _rope_table(self, weights: Weights) -> RopeTable:
        return RopeTable(self.rope, self.head_dim, weights.dtype, weights.device)

    def _norm(self, weights: Weights, name: str) -> Norm:
        return partial(rms_norm, weight=weights.tensor(f"{name}.weight", self.width), eps=self.eps)

    def _tokens(self, weights: Weights) -> Tensor:
        """[draft vocabulary] int64: the model's token of each, which is stored as a distance."""
        distances = weights.tensor("d2t", self.vocab, dtype=torch.int64)
        tokens_v = distances + torch.arange(self.vocab, device=distances.device)
        if not distances.is_meta and not bool(((tokens_v >= 0) & (tokens_v < self.spec.vocab_size)).all()):
            raise self.spec.config.refuse("d2t names tokens beyond the vocabulary")
        return tokens_v
