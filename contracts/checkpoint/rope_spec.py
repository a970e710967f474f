"""Rotary embeddings (rope) as checkpoints declare them, in the old and the new spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinpool.contracts.checkpoint.json_fields import JsonFields

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
    "factors": (),
    "longrope": ("factor", "original_max_position_embeddings"),
    "ntk_alpha": ("alpha",),
}
"""The supported kinds of scaling, each with the numbers that it requires."""
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "proportional": ("factor",),
    "factors": ("factors",),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
    "ntk_alpha": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""The further keys that a kind goes by."""
_TABLES = ("rope_scaling", "rope_parameters")
"""The old and the new name of the table; transformers takes the first one that isn't empty."""
_TRAINED = "original_max_position_embeddings"
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which frequencies turn with which axis of an image. In text all axes have the position, which gives plain rope."""
_GENERAL = ("type", "rope_type", "rope_theta", "partial_rotary_factor", *_OF_IMAGES)
_OTHER_NAMES = {"mrope": "default", "su": "longrope"}
_LISTS = {"factors": ("factors",), "longrope": ("short_factor", "long_factor")}
"""The lists of a number for each frequency that a kind requires."""
_DEFAULT_THETA = 10000.0
_MAX_POSITIONS = 2**31


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding as the checkpoint declares it; `kind` is transformers' ``rope_type``."""

    kind: str
    theta: float
    parameters: dict[str, object] = field(default_factory=dict)
    """The scaler's own numbers (``factor``, ``low_freq_factor``, ...), as written; of ``dynamic`` and ``longrope`` also
    the positions of training, ``original_max_position_embeddings``, and those that it is for, ``context``."""
    partial: float = 1.0
    """The share of a head's dimensions that are rotated, from the first on; 1: all."""
    axes: tuple[int, ...] = ()
    """Of a model that sees pictures: by which of its positions each frequency turns, 0 the one in time, 1 the row, 2
    the column; empty: there is but one position."""

    @property
    def factors_key(self) -> str:
        """Which list of ``longrope`` rotates all positions: the long one where sequences may be longer than those of
        training, however long each is: they share pages, and a page was rotated once."""
        trained, served = self.parameters[_TRAINED], self.parameters["context"]
        assert isinstance(trained, int | float)
        assert isinstance(served, int)
        return "long_factor" if served > trained else "short_factor"


def picture_axes(sections: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """The `RopeSpec.axes` of sections as configurations have them (``mrope_section``): so many frequencies turn in
    time, by row and by column, one section after the other, or `interleaved` in turn for as long as both have some."""
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for at in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[at] = axis
    return tuple(axes)


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """How long a sequence may be by a model's configuration, in positions."""

    usual: int
    """Without a setting."""
    most: int
    """With one; more than `usual` where scaling can do more, but whether it is meant to isn't written."""
    trained: int
    """Without scaling."""


def context_limits(config: JsonFields) -> ContextLimits:
    """Read the longest sequence that a configuration declares. Raises `CheckpointError` for a bad number.

    `max_position_embeddings`, or what yarn extends it to where that is more: `factor` times the length of training.
    Makers who ship yarn write the extended length into `max_position_embeddings` (DeepSeek, gpt-oss); who adds yarn to
    a model by its makers' advice leaves it as it was (Qwen). With linear scaling both are published. Dynamic scaling is
    used for longer sequences alone, so only a setting asks for it.
    """
    length, rope = config.size("max_position_embeddings"), _table(config)
    kind, factor = _kind(rope), rope.get("factor")
    trained = _trained(config.peek(_TRAINED), rope, length) if kind == "yarn" else length
    if kind not in ("yarn", "linear", "dynamic") or not (_is_positive(factor) and _is_positive(trained)):
        return ContextLimits(length, length, length)  # A bad number is refused by who reads the rope.
    assert isinstance(factor, int | float)
    assert isinstance(trained, int | float)
    if not factor * trained < _MAX_POSITIONS:
        raise config.refuse(f"rope scaling {kind!r} with factor {factor!r} makes more positions than can be counted")
    extended = max(length, int(factor * trained))
    return ContextLimits(extended if kind == "yarn" else length, extended, int(trained))


def rope_kind(config: JsonFields) -> str:
    """The kind of scaling by `config.json`, of the layers with full attention where layers differ."""
    return _kind(_table(config))


def rotated_for(config: JsonFields, served: int) -> str:
    """What of the longest sequence that is served the rotation of every key depends on, in words that differ where it
    does; empty where it doesn't."""
    table = _table(config)
    if _kind(table) == "dynamic":
        return f" for {max(served, context_limits(config).usual)}"
    if _kind(table) == "longrope":
        trained = _trained(config.peek(_TRAINED), table, config.size("max_position_embeddings"))
        return " for long sequences" if isinstance(trained, int) and served > trained else " for short sequences"
    return ""


def unknown_rope_keys(config: JsonFields) -> dict[str, object]:
    """The keys of the scaling that its kind doesn't go by, in transformers as here, with their values. To be called
    once the rope was read: a table that nobody asked for is an unknown key as a whole."""
    found: dict[str, object] = {}
    for name in [name for name in _TABLES if name in config.read]:
        table = config.table(name)
        parts = {f"{name}.{key}": part for key, part in table.items() if isinstance(part, Mapping)} or {name: table}
        for prefix, part in parts.items():
            kind = _kind(part)
            known = (*_GENERAL, *_NUMBERS.get(kind, ()), *_OPTIONAL.get(kind, ()))
            found |= {f"{prefix}.{key}": value for key, value in part.items() if key not in known}
    return found


def _table(config: JsonFields) -> Mapping[str, object]:
    """The scaling, of layers with full attention where it differs; empty where there is none. It is looked at only:
    an architecture without rope reads none."""
    table = next((found for key in _TABLES if isinstance(found := config.peek(key), Mapping) and found), {})
    of_full = table.get("full_attention")
    return of_full if isinstance(of_full, Mapping) else table


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _kind(table: Mapping[str, object]) -> str:
    kind = str(table.get("rope_type") or table.get("type") or "default")
    if kind == "dynamic" and table.get("alpha"):
        return "ntk_alpha"  # Hunyuan's: a larger base, whatever the length.
    return _OTHER_NAMES.get(kind, kind)


def _trained(given: object, table: Mapping[str, object], length: int) -> object:
    """The positions of training: as `given` outside of the table, as in transformers, else inside, else `length`."""
    return next((one for one in (given, table.get(_TRAINED)) if one is not None), length)


def read_rope(
    config: JsonFields,
    raw: Mapping[str, object] | None = None,
    *,
    context: int,
    theta_key: str = "rope_theta",
    default_theta: float = _DEFAULT_THETA,
    partial: bool = False,
    default_partial: float = 1.0,
    alpha: bool = False,
) -> RopeSpec:
    """Read the rope of a configuration, or of one kind of its layers if `raw` is that kind's part of `rope_parameters`.

    Old spelling: `rope_theta` beside `rope_scaling` (with ``type`` or ``rope_type``); new: `rope_parameters`.
    `partial`: whether the architecture knows `partial_rotary_factor`; where not given it is `default_partial`.
    `context`: the longest sequence that is served, which dynamic scaling and longrope are computed for. `alpha`:
    whether the architecture knows Hunyuan's scaling by `alpha`. Raises `CheckpointError` for a scaling that is unknown
    or lacks a number.
    """
    if raw is None:
        raw = config.table("rope_scaling") or config.table("rope_parameters")
        if any(isinstance(part, Mapping) for part in raw.values()):
            raise config.refuse("rope_parameters by kind of layer are not supported in this architecture")
    kind = _kind(raw)
    scaling = {key: value for key, value in raw.items() if value is not None and key not in _OF_IMAGES}
    scaling.pop("type", None)
    scaling.pop("rope_type", None)
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = config.number(theta_key, default_theta)
    if kind not in _NUMBERS or (kind == "ntk_alpha" and not alpha):
        raise config.refuse(f"unknown rope scaling {kind!r}; supported are {', '.join(_NUMBERS)}")
    turning = scaling.pop("partial_rotary_factor", config.values.get("partial_rotary_factor", default_partial))
    if not isinstance(turning, int | float) or not 0 < turning <= 1 or (turning != 1 and not partial):
        raise config.refuse(f"partial_rotary_factor {turning!r} is not supported here")
    for name in _LISTS.get(kind, ()):
        factors = scaling.get(name)
        if not isinstance(factors, list) or not all(_is_positive(one) for one in factors):
            raise config.refuse(f"rope scaling {kind!r} needs a list of positive numbers {name}, got {factors!r:.60}")
    if _TRAINED in _NUMBERS[kind]:
        scaling[_TRAINED] = _trained(config.values.get(_TRAINED), scaling, config.size("max_position_embeddings"))
    if kind == "longrope":
        length, trained = config.size("max_position_embeddings"), scaling[_TRAINED]
        if scaling.get("factor") is None and isinstance(trained, int) and trained > 0:
            scaling["factor"] = length / trained
        scaling["context"] = context
    if kind == "dynamic":
        trained = config.size("max_position_embeddings")
        scaling |= {_TRAINED: trained, "context": max(trained, context)}
    for key in (*_NUMBERS[kind], "rope_theta"):
        value = theta if key == "rope_theta" else scaling.get(key)
        if not _is_positive(value):
            raise config.refuse(f"rope scaling {kind!r} needs a positive {key}, got {value!r}")
    assert isinstance(theta, int | float)
    return RopeSpec(kind, float(theta), scaling, float(turning))
