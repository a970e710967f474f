"""Rotary embeddings (rope) as checkpoints declare them, in the old and the new spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.checkpoint.json_fields import JsonFields

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
    "factors": (),
}
"""The supported kinds of scaling, each with the numbers that it requires."""
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding as the checkpoint declares it; `kind` is transformers' ``rope_type``."""

    kind: str
    theta: float
    parameters: dict[str, object] = field(default_factory=dict)
    """The scaler's own numbers (``factor``, ``low_freq_factor``, ...), as written."""
    partial: float = 1.0
    """The share of a head's dimensions that are rotated, from the first on; 1: all."""


def read_rope(
    config: JsonFields,
    raw: Mapping[str, object] | None = None,
    *,
    theta_key: str = "rope_theta",
    default_theta: float = _DEFAULT_THETA,
    partial: bool = False,
    default_partial: float = 1.0,
) -> RopeSpec:
    """Read the rope of a configuration, or of one kind of its layers if `raw` is that kind's part of `rope_parameters`.

    Old spelling: `rope_theta` beside `rope_scaling` (with ``type`` or ``rope_type``); new: `rope_parameters`.
    `partial`: whether the architecture knows `partial_rotary_factor`; where not given it is `default_partial`. Raises
    `CheckpointError` for a scaling that is unknown, lacks a number, or depends on the length of the whole sequence.
    """
    if raw is None:
        raw = config.table("rope_scaling") or config.table("rope_parameters")
    scaling = {key: value for key, value in raw.items() if value is not None}
    old_kind = scaling.pop("type", None)
    kind = str(scaling.pop("rope_type", None) or old_kind or "default")
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = config.number(theta_key, default_theta)
    if kind in _LENGTH_DEPENDENT:
        raise config.refuse(
            f"rope scaling {kind!r} is not supported: its angles depend on the length of the whole sequence, so keys "
            "computed earlier would be wrong later"
        )
    if kind not in _NUMBERS:
        raise config.refuse(f"unknown rope scaling {kind!r}; supported are {', '.join(_NUMBERS)}")
    turning = scaling.pop("partial_rotary_factor", config.values.get("partial_rotary_factor", default_partial))
    if not isinstance(turning, int | float) or not 0 < turning <= 1 or (turning != 1 and not partial):
        raise config.refuse(f"partial_rotary_factor {turning!r} is not supported here")
    if kind == "factors":
        factors = scaling.get("factors")
        if not isinstance(factors, list) or not all(isinstance(one, float) and one > 0 for one in factors):
            raise config.refuse(f"rope scaling 'factors' needs a list of positive numbers, got {factors!r:.60}")
    if "original_max_position_embeddings" in _NUMBERS[kind]:
        given = config.values.get("original_max_position_embeddings")
        if given is not None:
            scaling["original_max_position_embeddings"] = given
        scaling.setdefault("original_max_position_embeddings", config.size("max_position_embeddings"))
    for key in (*_NUMBERS[kind], "rope_theta"):
        value = theta if key == "rope_theta" else scaling.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise config.refuse(f"rope scaling {kind!r} needs a positive {key}, got {value!r}")
    assert isinstance(theta, int | float)
    return RopeSpec(kind, float(theta), scaling, float(turning))
