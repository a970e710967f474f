"""The decoder that all models share: embedding, layers, final norm, logits; the draft layer that may be behind it; and
the forward context, what its layers are given in one step besides the activations.

Activations are [M, hidden]: the tokens of all sequences packed on one axis, T of them, padded to the numerics'
quantum with rows that are computed like the rest and written nowhere. Every operation on activations is by row. State
is read and written through the load gates only, one layer of one pool at a time.

A *draft layer* (`engine.layers.draft_layers`) predicts the token behind next: at position `i` it reads token `i` and
what the model has made of position `i - 1`, its *feature*, and gives what stands for the feature of position `i`. It
has keys and values like any layer. Every step computes it behind the model, at the step's own positions, so its state
at a position hangs on the tokens up to there alone: it is shared, handed over, swapped and migrated with the pages of
the model, and what a step computes for a rejected draft is written over as the model's is. The features are kept beside
them, since the first position of a step needs that of the last step's end, or of a prefix that another request has
computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from twinpool.cache.pool.pool_set import GateDoor, LayerBuffers
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan, muted, muted_slots
from twinpool.engine.attention.kv_quantization import store
from twinpool.engine.layers.norm import add_rms_norm, rms_norm
from twinpool.engine.native.current_kernels import LayerKernels, using
from twinpool.engine.tensors.adapters import StepAdapters
from twinpool.engine.tensors.row_exact_linear import AdaptedLayer, Numerics, RowExactLinear, tanh
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

if TYPE_CHECKING:
    from twinpool.engine.layers.moe.expert_group import Spread, SpreadStep
    from twinpool.engine.layers.picture_encoder import StepPictures
    from twinpool.engine.layers.picture_tower import PictureTower
    from twinpool.engine.layers.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer of the model keeps its state: the pool's name, and which of the pool's layers it is."""

    pool: str
    layer: int


@dataclass
class ForwardContext:
    """The context of one step."""

    numerics: Numerics
    attention: AttentionBackend
    positions_m: Tensor
    """[M] int64: absolute positions; 0 for padding."""
    longest: int
    """The largest position plus one."""
    count: int
    """T: rows that are tokens; the other M - T are padding."""
    plans: Mapping[str, AttentionPlan]
    """The attention plans of full and window pools, by name."""
    slots: Mapping[str, SlotPlan]
    """The slot plans of state pools, by name."""
    doors: Mapping[str, GateDoor]
    """The doors of the load gates of all pools, by name."""
    ranks: TensorParallelGroup = ALONE
    passed: Callable[[], None] | None = None
    """To be called, if any, after each layer of the model: what it writes of the state is written, or on its way
    there."""
    pictured: StepPictures | None = None
    """What stands in place of rows of the embedding, and is added behind layers; None: the step has no pictures."""
    turned_cm: Tensor | None = None
    """[3, M] int64: by which position in time, by row and by column each token is turned where ropes have several;
    None: all three are `positions_m`."""
    adapters: StepAdapters | None = None
    """The adapters of the step's rows; None: no row has one."""
    spread: SpreadStep | None = None
    """The step of all workers that share their experts; None: of models whose experts are all here."""
    chosen: list[Tensor] | None = None
    """Where asked for, what each mixture of experts of the model has chosen, [T, k] int64 each, in order; None: nobody
    asks."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Values that a layer leaves for later layers of the same step, such as selections."""

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        """Compute a product of padded rows; summed over ranks where each rank has a part of it."""
        out = self.numerics.linear(x_mk, linear) if self.numerics.tiled else linear.product(x_mk)
        if self.adapters is not None and linear.layers:
            self.adapters.add(out, x_mk, linear, self.numerics)
        return self.sum(out) if linear.partial else out

    def sum(self, x: Tensor) -> Tensor:
        """Sum every rank's `x`, adding in the order of the ranks."""
        return self.ranks.sum(x)

    def buffers(self, place: LayerPlace) -> LayerBuffers:
        """Return a layer's buffers by name, after the loads that they are waiting for."""
        return self.doors[place.pool].layer(place.layer)

    def rope(self, table: RopeTable) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of the step's positions, [M, 1, rope_dim] each; looked up once a step."""
        key = ("rope", id(table))
        if key not in self.scratch:
            positions = self.positions_m if self.turned_cm is None or table.axes_d is None else self.turned_cm
            self.scratch[key] = table.at(positions, self.longest)
        found: tuple[Tensor, Tensor] = self.scratch[key]
        return found

    def told(self, turned: bool) -> list[Tensor]:
        """By which positions tokens are turned, axis by axis ([M] int64 each), which other ranks have to be told of a
        model whose pictures turn them; nothing of others."""
        if not turned:
            return []
        return [self.positions_m] * 3 if self.turned_cm is None else [*self.turned_cm]

    def mute(self, stale_b: Tensor) -> None:
        """Redirect the writes of stale sequences ([B] bool) to the null page and the null slot, as zeros."""
        if not stale_b.is_cpu or stale_b.any():
            self.plans = {pool: muted(plan, stale_b) for pool, plan in self.plans.items()}
            self.slots = {pool: muted_slots(plan, stale_b) for pool, plan in self.slots.items()}

    def padded(self, x_tn: Tensor) -> Tensor:
        """Append the padding rows (zeros) to the T rows of tokens again: [M, ...]."""
        lacking = len(self.positions_m) - len(x_tn)
        return torch.cat((x_tn, x_tn.new_zeros(lacking, *x_tn.shape[1:]))) if lacking else x_tn


Norm = Callable[[Tensor], Tensor]


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream after this layer, [M, hidden]; `x_mh` may be changed."""


Sublayer = Callable[[Tensor, ForwardContext], Tensor]


@dataclass(frozen=True)
class PreNormLayer:
    """A layer that computes x + mixer(norm(x)), then x + mlp(norm(x)), as Llama and most later models do."""

    input_norm_h: Tensor
    mixer: Sublayer
    mlp_norm_h: Tensor
    mlp: Sublayer
    eps: float

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        mixed_mh = self.mixer(rms_norm(x_mh, self.input_norm_h, self.eps), ctx)
        x_mh, normed_mh = add_rms_norm(x_mh, mixed_mh, self.mlp_norm_h, self.eps)
        return x_mh.add_(self.mlp(normed_mh, ctx))


def unchanged(x: Tensor) -> Tensor:
    """The norm of a layer that has none in some place."""
    return x


SANDWICH = tuple(f"{place}_layernorm" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"))
"""The names of Gemma's norms before and behind a layer's parts."""


@dataclass(frozen=True)
class NormedLayer:
    """A layer that computes x + f * n2(mixer(n1(x))), then x + f * n4(mlp(n3(x))): norms before its parts, behind them,
    or both, and a factor on what they add."""

    before_mixer: Norm
    mixer: Sublayer
    after_mixer: Norm
    before_mlp: Norm
    mlp: Sublayer
    after_mlp: Norm
    factor: float = 1.0

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        x_mh = x_mh + self._scaled(self.after_mixer(self.mixer(self.before_mixer(x_mh), ctx)))
        return x_mh.add_(self._scaled(self.after_mlp(self.mlp(self.before_mlp(x_mh), ctx))))

    def _scaled(self, added_mh: Tensor) -> Tensor:
        return added_mh if self.factor == 1.0 else added_mh * self.factor


@dataclass(frozen=True)
class ParallelLayer:
    """A layer that computes x + mixer(norm(x)) + mlp(norm(x)), one norm for both."""

    norm: Norm
    mixer: Sublayer
    mlp: Sublayer

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        normed_mh = self.norm(x_mh)
        return (x_mh + self.mixer(normed_mh, ctx)).add_(self.mlp(normed_mh, ctx))


FEATURES = "draft_features"
"""The buffer of features, [hidden] a token, in layer 0 of the pool that the draft layer is in."""


@dataclass(frozen=True)
class DraftLayer(ABC):
    """What all draft layers share: features that are kept, an embedding, a head and a vocabulary of their own."""

    pool: str
    """The pool that features are kept in; a full one."""
    head: RowExactLinear | None
    """None: the model's."""
    embed_vh: Tensor | None
    """None: the model's."""
    vocab_v: Tensor | None
    """[vocab] int64: the tokens that the head has a logit for, in its order; None: all."""
    taps: tuple[int, ...]
    """The layers of the model whose inputs features are made of; none: they are made of the last hidden states."""

    @abstractmethod
    def features(self, hidden: Sequence[Tensor], ctx: ForwardContext) -> Tensor:
        """The features of the step's positions, [M, width], of the model's hidden states there, [M, hidden] each."""

    @abstractmethod
    def __call__(self, embedded_mh: Tensor, features_mh: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the step's positions from the embeddings of their tokens and the features of the positions before
        them, [M, width], and write their keys and values; returns what stands for their features."""

    @abstractmethod
    def normed(self, features_mh: Tensor) -> Tensor:
        """What the head reads of that which stands for features."""

    def keep(self, features_mh: Tensor, ctx: ForwardContext) -> None:
        """Write the features of the step's positions."""
        store(self._buffers(ctx), FEATURES, features_mh[: ctx.count], ctx.plans[self.pool])

    def before(self, features_mh: Tensor, ctx: ForwardContext) -> Tensor:
        """The features of the positions before the step's, [M, width]: of the sequences' first ones as they are kept,
        zeros before position 0; of the others out of those of the step."""
        plan = ctx.plans[self.pool]
        at_b = (plan.starts_b.long() - 1).clamp_min(0)
        pages_b = plan.tables_bp.gather(1, (at_b // plan.page_tokens).unsqueeze(1)).squeeze(1).long()
        kept_nh = self._buffers(ctx)[FEATURES].flatten(0, 1)
        first_bh = kept_nh[pages_b * plan.page_tokens + at_b % plan.page_tokens]
        first_bh = first_bh.masked_fill((plan.starts_b == 0).unsqueeze(1), 0.0)
        shifted_mh = torch.roll(features_mh, 1, dims=0)
        return shifted_mh.index_copy_(0, plan.offsets_b[:-1].long(), first_bh)

    def kept_before(self, ctx: ForwardContext) -> Tensor:
        """`before` of a step with one position a sequence."""
        kept = self._buffers(ctx)[FEATURES]
        return self.before(kept.new_zeros(len(ctx.positions_m), kept.shape[-1]), ctx)

    def _buffers(self, ctx: ForwardContext) -> LayerBuffers:
        return ctx.buffers(LayerPlace(self.pool, 0))


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the stages that a worker's layers are divided into. What the last one has computed goes back to the first,
    which has the head: all that draws or scores is in one process, whatever the number of stages."""

    number: int = 0
    count: int = 1

    def begin(self, like: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream before this stage's layers, from the stage before it; `like`: of its shape."""
        return ctx.ranks.receive(like, self.number - 1)

    def end(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        """Send on the residual stream behind this stage's layers. The first stage returns that of the last one."""
        if self.count == 1:
            return x_mh
        ctx.ranks.send(x_mh, (self.number + 1) % self.count)
        return x_mh if self.number else ctx.ranks.receive(torch.empty_like(x_mh), self.count - 1)


class DenseLayer(NamedTuple):
    """A module `Dense` of sentence-transformers, in float32."""

    product: RowExactLinear
    tanh: bool


@dataclass
class Decoder:
    """A model's weights, or those of one stage, and the computation of one step with them."""

    embed_vh: Tensor | RowExactLinear
    """The embedding [vocab, hidden]; in blocks, a product of whose rows are unpacked when they are looked up. Of stages
    behind the first: of no token, [0, hidden]."""
    layers: Sequence[Layer]
    norm: Norm
    """The norm of the last layer's output, before the head."""
    head: RowExactLinear | None
    """What makes logits, of tokens or of classes. None: of stages behind the first."""
    embed_scale: float | None = None
    """What rows of the embedding are multiplied with; the product is rounded to their dtype, the factor isn't."""
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    """Logits are squeezed to plus or minus this by a hyperbolic tangent; 0: not at all."""
    kernels: LayerKernels | None = None
    """The kernels that layers use; None: torch's operations alone."""
    adapted: Mapping[str, AdaptedLayer] = field(default_factory=dict)
    """The layers that adapters may add to, by name."""
    prepare: Callable[[Tensor, Tensor, ForwardContext], None] | None = None
    """Called first with tokens [M] and embeddings [M, hidden]; leaves further inputs of layers in the scratch."""
    draft: DraftLayer | None = None
    tower: PictureTower | None = None
    """What computes pictures; None: it takes none."""
    turned: bool = False
    """Whether pictures turn positions by three axes, so that ranks are told how."""
    stage: Stage = Stage()
    mixtures: Sequence[Spread] = ()
    """The layers' mixtures of experts that workers share, in the order in which a step computes them."""
    routes: bool = False
    """Whether some layers are mixtures of experts, which tell what they choose (`ForwardContext.chosen`)."""
    dense: Sequence[DenseLayer] = ()
    """What embeddings go through where their checkpoint has such modules."""

    @property
    def tells_experts(self) -> bool:
        """Whether rows of a step may be `routed`: there are mixtures of experts, and all layers are here."""
        return self.routes and self.stage.count == 1

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_vh.dtype

    def forward(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute a step's tokens ([M] int64) and write their state; returns the last layer's output, [M, hidden]; on
        stages behind the first that of their own last layer."""
        with using(self.kernels):
            x_mh, stacked = self._begun(tokens_m, ctx)
            taps, tapped = self.draft.taps if self.draft is not None else (), list[Tensor]()
            for number, layer in enumerate(self.layers):
                if number in taps:
                    tapped.append(x_mh.clone())
                x_mh = layer(x_mh, ctx)
                if ctx.pictured is not None and number < len(stacked):
                    x_mh = x_mh.index_add(0, ctx.pictured.places_n, stacked[number])
                # Features are in the first layer, and known behind the last one.
                if ctx.passed is not None and self.draft is None:
                    ctx.passed()
            if self.draft is not None:
                ctx.adapters = ctx.chosen = None  # They are the model's alone.
                features_mh = self.draft.features(tapped or [self.norm(x_mh)], ctx)
                self.draft.keep(features_mh, ctx)
                self.draft(self._draft_embedded(tokens_m), self.draft.before(features_mh, ctx), ctx)
                if ctx.passed is not None:
                    ctx.passed()
            return self.stage.end(x_mh, ctx)

    def _begun(self, tokens_m: Tensor, ctx: ForwardContext) -> tuple[Tensor, Sequence[Tensor]]:
        """The residual stream before this stage's first layer, [M, hidden], and what pictures add behind the first
        layers of the model, [n, hidden] each."""
        if self.stage.number:
            like_mh = torch.empty(len(tokens_m), self.embed_vh.shape[1], dtype=self.dtype, device=tokens_m.device)
            return self.stage.begin(like_mh, ctx), ()
        x_mh = self.embed_vh[tokens_m]
        if self.embed_scale is not None:
            x_mh = x_mh * self.embed_scale
        stacked: Sequence[Tensor] = ()
        if ctx.pictured is not None:
            shown_nh, *stacked = torch.split(ctx.pictured.rows_nh, x_mh.shape[1], dim=1)
            x_mh = x_mh.index_copy(0, ctx.pictured.places_n, shown_nh)
        if self.prepare is not None:
            self.prepare(tokens_m, x_mh, ctx)
        return x_mh, stacked

    def draft_from(self, tokens_m: Tensor, features_mh: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Compute the draft layer alone, one position a sequence ([M] int64), and write its keys and values; returns
        what stands for the features of these positions, [M, hidden]. `features_mh`: what stood for those before them;
        None: as they are kept."""
        assert self.draft is not None, "the model has a draft layer"
        with using(self.kernels):
            if features_mh is None:
                features_mh = self.draft.kept_before(ctx)
            return self.draft(self._draft_embedded(tokens_m), features_mh, ctx)

    def draft_logits(self, features_nh: Tensor, numerics: Numerics) -> Tensor:
        """Compute the logits of the tokens behind next, [n, vocab] float32, from what `draft_from` gave; minus infinity
        for tokens that the draft layer doesn't know."""
        draft = self.draft
        assert draft is not None, "the model has a draft layer"
        with using(self.kernels):
            logits_nv = self._logits(draft.normed(features_nh), draft.head or self._own_head, numerics)
        if draft.vocab_v is None:
            return logits_nv
        whole_nv = logits_nv.new_full((len(logits_nv), self._own_head.shape[0]), -torch.inf)
        return whole_nv.index_copy_(1, draft.vocab_v, logits_nv)

    def _draft_embedded(self, tokens_m: Tensor) -> Tensor:
        table = self.draft.embed_vh if self.draft is not None else None
        return self.embed_vh[tokens_m] if table is None else table[tokens_m]

    def logits(self, x_nh: Tensor, numerics: Numerics) -> Tensor:
        """Compute the logits of some rows [n, hidden] of `forward`'s result: [n, vocab] float32."""
        with using(self.kernels):
            return self._logits(self.norm(x_nh), self._own_head, numerics)

    @property
    def _own_head(self) -> RowExactLinear:
        assert self.head is not None, "the first stage has the head"
        return self.head

    def embeddings(self, x_nh: Tensor) -> Tensor:
        """Compute the hidden states of some rows [n, hidden] of `forward`'s result, of which embeddings are made: those
        behind the final norm, [n, hidden] float32."""
        with using(self.kernels):
            return self.norm(x_nh).float()

    def classes(self, x_nh: Tensor, numerics: Numerics) -> Tensor:
        """Compute the logits of classes behind some rows [n, hidden] of `forward`'s result, where the head is one for
        classes: [n, classes] float32."""
        with using(self.kernels):
            return self._product(self.norm(x_nh), self._own_head, numerics)

    def projected(self, pooled_nh: Tensor, numerics: Numerics) -> Tensor:
        """Bring pooled vectors, [n, hidden] float32, through the `dense` modules: [n, outputs] float32."""
        for layer in self.dense:
            pooled_nh = self._product(pooled_nh, layer.product, numerics)
            pooled_nh = tanh(pooled_nh) if layer.tanh else pooled_nh
        return pooled_nh

    def _product(self, x_nk: Tensor, linear: RowExactLinear, numerics: Numerics) -> Tensor:
        """The product of a few rows, [n, k], which are padded for it: [n, outputs] float32."""
        rows = len(x_nk)
        if (padded := numerics.padded(rows)) > rows:
            x_nk = torch.cat((x_nk, x_nk.new_zeros(padded - rows, x_nk.shape[1])))
        with using(self.kernels):
            return numerics.linear(x_nk, linear)[:rows].float()

    def _logits(self, normed_nh: Tensor, head: RowExactLinear, numerics: Numerics) -> Tensor:
        logits_nv = self._product(normed_nh, head, numerics)
        if self.logits_scale != 1.0:
            logits_nv = logits_nv * self.logits_scale
        if self.logits_softcap:
            logits_nv = tanh(logits_nv / self.logits_softcap).mul_(self.logits_softcap)
        return logits_nv
