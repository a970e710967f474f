"""Our functions in transformers' tables of attention, masks and experts, and what a module is seen to ask of them.

What a module's layers keep is found by a *trace*: a forward pass on the meta device, in which our functions write down
what they are asked for. What it shows that can't be computed here is refused with its reason (`traced`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 - torch has no public name for it

from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.layers.norm import gelu_tanh, sigmoid, softplus
from twinpool.engine.tensors.row_exact_linear import FAST, TILE_ROWS, Numerics, silu

NAME = "twinpool"
"""Of our functions for attention, masks and experts in transformers' tables of them."""
_TRACED_ROWS = 4
META = torch.device("meta")
_NO_INTERFACE = "its attention doesn't go through transformers' attention interface"
_KINDS = frozenset(("full_attention", "sliding_attention"))
"""Of layers, by transformers' names: those that keep keys and values of earlier positions alone."""
_OPTIONS = """
    dropout position_ids sliding_window use_cache output_attentions output_hidden_states output_router_logits
    return_dict cache_position deterministic
"""
_WITHOUT_EFFECT = frozenset(_OPTIONS.split())
"""What modules pass to attention and is without effect here: windows are read from masks."""
_OPERATIONS = """
    abs add alias arange bitwise_not cat chunk clamp clamp_min clamp_max clone concat contiguous copy cos detach div
    dropout embedding empty empty_like eq erf exp expand expand_as expm1 flatten full full_like gather ge gt index
    index_select item layer_norm le leaky_relu lift_fresh linear log log1p log_sigmoid logical_not lt masked_fill max
    maximum min minimum movedim mul narrow ne neg new_empty new_full new_ones new_zeros ones ones_like permute
    reciprocal relu repeat repeat_interleave reshape reshape_as rms_norm rsqrt rsub scalar_tensor scatter select
    sin slice softmax split split_with_sizes sqrt square squeeze stack sub tanh to topk transpose
    type_as unbind unflatten unsqueeze view view_as where zeros zeros_like __and__ __or__
"""
_BY_ROW = frozenset(_OPERATIONS.split())
"""Operations of aten that give each row its own bits, however many there are; `_by_row` knows some more."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer of a module asks of attention."""

    layer: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    """How many positions a query sees, its own included; 0: all."""


@dataclass(frozen=True)
class Trace:
    """What a forward pass of a module was seen to do."""

    calls: tuple[AttentionCall, ...]
    """One a layer, by layer."""
    parameters: Mapping[str, tuple[int, ...]]
    """The shapes of its parameters by name, each once."""
    embedding: tuple[int, ...]
    """The shape of the embedding."""
    tied: bool
    """Whether the head is the embedding."""
    inexact: tuple[str, ...]
    """Operations that may give a row other bits in another batch."""


class _Unfit(Exception):
    """Why a module can't be computed here, in words."""


class ModuleHost(Protocol):
    """What a module's calls of our functions go to while it computes."""

    numerics: Numerics

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        """Attend from queries [1, heads, M, dim] to keys and values [1, kv_heads, M, dim]: [1, M, heads, dim]."""

    def mask(self, rows: int, visible: Callable[..., Any], device: torch.device) -> Tensor:
        """Make the mask of `rows` queries that see what `visible`(batch, head, query, key) says."""

    def experts(self, module: nn.Module, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
        """Sum the weighted outputs of each row's experts."""


class _Hosting(threading.local):
    host: ModuleHost | None = None


_current = _Hosting()


@contextmanager
def hosted_by(who: ModuleHost) -> Iterator[None]:
    """Let the modules of this thread ask `who` inside the context."""
    before, _current.host = _current.host, who
    try:
        with RowExact():
            yield
    finally:
        _current.host = before


def host() -> ModuleHost:
    assert _current.host is not None, "modules compute within `hosted_by`"
    return _current.host


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    return host().attend(module, query, key, value, attention_mask, options), None


def _mask(*, q_length: int, mask_function: Callable[..., Any], device: torch.device, **others: Any) -> Tensor:
    return host().mask(q_length, mask_function, device)


def _experts(module: nn.Module, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
    return host().experts(module, h_th, experts_tk, weights_tk)


@cache
def registered() -> Any:
    """The package transformers, in whose tables our functions are. Raises `ConfigError` where it isn't installed."""
    try:
        import transformers
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ConfigError(
            f"engine.models=transformers needs the package transformers: pip install 'twinpool[transformers]' ({error})"
        ) from None
    transformers.logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return transformers


class RowExact(TorchFunctionMode):
    """Computes products with weights, and activations, so that rows are exact (`_OWN`)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _OWN.get(func, func)
        return own(*args, **(kwargs or {}))


def _linear(x: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """A product with a weight that is no layer's own, such as a router's: in tiles of one height."""
    if x.is_meta or not host().numerics.invariant:
        return F.linear(x, weight_nk, bias_n)
    rows_mk = x.reshape(-1, x.shape[-1])
    count = len(rows_mk)
    lacking = -count % TILE_ROWS
    if lacking:
        rows_mk = torch.cat((rows_mk, rows_mk.new_zeros(lacking, rows_mk.shape[1])))
    out = torch.cat([F.linear(tile, weight_nk, bias_n) for tile in torch.split(rows_mk, TILE_ROWS)])
    return out[:count].view(*x.shape[:-1], -1)


def _by_element(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def computed(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return function(x.to(torch.float32, copy=True)).to(x.dtype)

    return computed


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return _by_element(gelu_tanh if approximate == "tanh" else _gelu_erf)(x)


def _gelu_erf(x: Tensor) -> Tensor:
    return torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return _by_element(lambda y: torch.where(y * beta > threshold, y, softplus(y * beta) / beta))(x)


_OWN: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.silu: _by_element(silu),
    F.gelu: _gelu,
    F.softplus: _softplus,
    **{function: _by_element(torch.rsqrt) for function in (torch.rsqrt, Tensor.rsqrt)},
    **{function: _by_element(sigmoid) for function in (torch.sigmoid, Tensor.sigmoid, F.sigmoid)},
}


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations that may not be by row."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not _by_row(name, args):
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def _by_row(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation of aten gives each row its own bits, however many there are."""
    if name in ("matmul", "bmm"):  # Over one term it multiplies numbers: angles of rope are made so.
        return bool(args[0].shape[-1] == 1)
    if name == "pow":
        return isinstance(args[1], int | float) and args[1] in (2, 3)
    if name in ("sum", "mean"):
        over = args[1] if len(args) > 1 else None
        return (over[0] if isinstance(over, list) and len(over) == 1 else over) in (-1, args[0].dim() - 1)
    return name.rstrip("_") in _BY_ROW or name in _BY_ROW


@dataclass
class _Tracing:
    """Answers a module on the meta device, and writes down what it asks for."""

    context: int
    numerics: Numerics = FAST
    calls: list[AttentionCall] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, Callable[..., Any]]] = field(default_factory=dict)
    """By their ids, each with its rule."""
    seen_by: list[int] = field(default_factory=list)
    """The id of each call's mask."""

    def mask(self, rows: int, visible: Callable[..., Any], device: torch.device) -> Tensor:
        made = flat_mask(rows, device)
        self.masks[id(made)] = made, visible
        return made

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise _Unfit("its attention doesn't say of which layer it is")
        if k.shape[2] != q.shape[2] or q.shape[2] != _TRACED_ROWS:
            raise _Unfit(f"layer {layer} attends to something else than the positions so far (cross-attention)")
        if id(mask) not in self.masks:
            raise _Unfit(f"layer {layer} has a mask of its own making")
        read_options(q, layer, options)
        self.calls.append(AttentionCall(layer, q.shape[1], k.shape[1], k.shape[3], v.shape[3], 0))
        self.seen_by.append(id(mask))
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            raise _Unfit(f"layer {layer} has {q.shape[1]} heads, {k.shape[1]} of keys and {v.shape[1]} of values")
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def experts(self, module: nn.Module, h_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
        if getattr(module, "has_post_expert_norm", False):
            raise _Unfit("its experts have norms of their own")
        return torch.empty_like(h_th)


def flat_mask(rows: int, device: torch.device) -> Tensor:
    """What stands for a mask where modules look at its shape."""
    return torch.empty(1, device=device).expand(1, 1, rows, rows)


def _window(visible: Callable[..., Any], context: int) -> int:
    """How many positions a query sees by a mask's rule: the last ones, its own included; 0: all. Raises `_Unfit`."""
    zero, last = torch.tensor(0), context - 1

    def seen(query: int) -> list[int]:
        keys = torch.arange(query + 2)
        return (
            torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(query + 2).nonzero()[:, 0].tolist()
        )

    try:
        width = len(seen(last))
        for query in {0, 1, 2, 3, width - 2, width - 1, width, width + 1, last // 2, last}:
            if 0 <= query <= last and seen(query) != list(range(max(0, query - width + 1), query + 1)):
                raise _Unfit("a mask that is neither causal nor a window (bidirectional, in chunks, or by blocks)")
    except (RuntimeError, NotImplementedError) as error:
        raise _Unfit(f"a mask that hangs on the step ({error})") from None
    return 0 if width == context else width


def read_options(q: Tensor, layer: int, options: Mapping[str, Any]) -> ScoreOptions:
    """The options of scores among what a module passes to attention, but for the window. Raises `_Unfit` for others."""
    given = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
    scale, softcap = given.pop("scaling", None), given.pop("softcap", None)
    sinks = given.pop("s_aux", given.pop("sinks", None))
    if given.pop("is_causal", True) is False:
        raise _Unfit(f"layer {layer} isn't causal")
    if given:
        raise _Unfit(f"layer {layer} passes {', '.join(sorted(given))} to attention")
    if sinks is not None and sinks.numel() != q.shape[1]:
        raise _Unfit(f"layer {layer} has {sinks.numel()} sinks for {q.shape[1]} heads")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return ScoreOptions(scale, 0, softcap or 0.0, None if sinks is None else sinks.reshape(-1).float())


def config_of(path: Path) -> Any:
    """transformers' configuration of the `config.json` at `path`. Raises `CheckpointError`."""
    transformers = registered()
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
    except Exception as error:  # Whatever its checks raise.
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} doesn't know this model: {error!s:.200}"
        ) from None
    config._attn_implementation = config._experts_implementation = NAME
    return config


@cache
def traced(path: Path, content: str, context: int) -> Trace:
    """Trace the module of the `config.json` at `path`, of which `content` makes a changed one another. Raises
    `CheckpointError`."""
    transformers, config = registered(), config_of(path)
    try:
        if getattr(config, "is_encoder_decoder", False):
            raise _Unfit("it is an encoder with a decoder")
        _check_rope(config)
        try:
            with META:
                module = transformers.AutoModelForCausalLM.from_config(config).eval()
        except KeyError:
            raise _Unfit(_NO_INTERFACE) from None
        except ValueError as error:
            raise _Unfit(f"transformers has no decoder of it ({error!s:.100})") from None
        return _trace(module, config, context)
    except _Unfit as error:
        raise CheckpointError(f"{path}: engine.models=transformers can't compute this model: {error}") from None


def _check_rope(config: Any) -> None:
    given = getattr(config, "rope_parameters", None) or {}
    kinds = given.values() if all(isinstance(each, dict) for each in given.values()) else [given]
    for kind in {str(each.get("rope_type", each.get("type", "default"))) for each in kinds}:
        if kind in ("dynamic", "longrope"):
            raise _Unfit(f"rope of kind {kind} hangs on the longest row of a step")


def _trace(module: Any, config: Any, context: int) -> Trace:
    if getattr(module, "_is_stateful", False):
        raise _Unfit("its layers keep other state than keys and values (recurrent ones)")
    if others := set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KINDS:
        raise _Unfit(f"layers of kind {', '.join(sorted(map(str, others)))}: it needs a model file")
    if "position_ids" not in inspect.signature(module.base_model.forward).parameters:
        raise _Unfit("its positions can't be given")
    seen, operations = _Tracing(context), _Operations()
    positions = torch.arange(_TRACED_ROWS, device=META)[None]
    try:
        with torch.inference_mode(), hosted_by(seen), operations:
            module(
                input_ids=positions, position_ids=positions, attention_mask=torch.ones_like(positions), use_cache=False
            )
    except _Unfit:
        raise
    except Exception as error:  # Whatever a module raises that meets a device without numbers.
        raise _Unfit(f"its forward pass can't be followed ({type(error).__name__}: {error!s:.120})") from None
    windows = {key: _window(visible, context) for key, (_, visible) in seen.masks.items() if key in seen.seen_by}
    calls = [replace(call, window=windows[key]) for call, key in zip(seen.calls, seen.seen_by, strict=True)]
    layers = [call.layer for call in calls]
    if not layers:
        raise _Unfit(_NO_INTERFACE)
    if len(set(layers)) < len(layers):
        raise _Unfit("a layer attends more than once")
    if sorted(layers) != list(range(config.get_text_config().num_hidden_layers)):
        raise _Unfit("not every layer attends: others keep other state than keys and values")
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _Unfit("its head is no product")
    return Trace(
        tuple(sorted(calls, key=lambda call: call.layer)),
        {name: tuple(parameter.shape) for name, parameter in module.named_parameters()},
        tuple(module.get_input_embeddings().weight.shape),
        head.weight is module.get_input_embeddings().weight,
        tuple(sorted(operations.others)),
    )
