"""The headers that a checkpoint would have, of a model of which there is only `config.json`.

A model is built once with weights that take every tensor it asks for to be there, and write it down
(`AskedWeights`). Which of them are stored quantised, and in which tensors, is what `quantization_config` says
(`planned_spec`). The spec with these headers goes where that of a downloaded checkpoint does, so that memory is counted
by the code that loads weights, and there is no second list of tensors.

Not in it: tensors that no model here asks for, as the layer of DeepSeek that predicts a second token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.safetensors_headers import TensorHeader, canonical_name, spelled_names
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.models.registry import DEFAULTS, unchecked_model
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.tensors.weight_loader import LoadFiles, Weights, is_product
from twinpool.engine.weight_formats.block_weight import Weight

PLANNED = ("fp8", "mxfp4", "compressed-tensors")
"""The methods whose tensors can be told from `config.json` alone."""
_META = torch.device("meta")
_MXFP4 = 32
_WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4, "U8": 1}


@dataclass
class Asked:
    """The tensors that a model asks for, whole, by the names that a checkpoint has for them."""

    products: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Weights of products [n, k], by their layers."""
    experts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Weights [experts, n, k] that lie in one tensor in MXFP4."""
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        shapes = [*self.products.values(), *self.experts.values(), *self.others.values()]
        return sum(prod(shape) for shape in shapes)


class AskedWeights(Weights):
    """Weights that are all there, on the meta device, and are written down as they are asked for."""

    def __init__(self, spec: ModelSpec, asked: Asked, prefix: str = "", files: LoadFiles | None = None) -> None:
        super().__init__(spec, torch.float32, _META, prefix=prefix, files=files)
        self._asked = asked

    def scope(self, prefix: str) -> AskedWeights:
        return AskedWeights(self.spec, self._asked, self._prefix + prefix, self._files)

    def has(self, name: str) -> bool:
        """Of what a checkpoint may have or not: the experts of gpt-oss in MXFP4."""
        return self.spec.quantization.method == "mxfp4" and name.endswith(("_blocks", "_scales"))

    def ranges(self, name: str, rows: Sequence[int | ShardAxis], columns: int | ShardAxis) -> list[Weight]:
        n, k = _whole(rows[0]), _whole(columns)
        self._asked.products[self._prefix + name] = n, k
        return [torch.empty(_here(each), k, device=_META) for each in rows]

    def tensor(self, name: str, *shape: int | ShardAxis, dtype: torch.dtype | None = None) -> Tensor:
        full, whole = self._prefix + name, tuple(_whole(axis) for axis in shape)
        layer = full.removesuffix(".weight")
        if layer != full and len(whole) == 2 and is_product(layer):
            self._asked.products[layer] = whole[0], whole[1]
        else:
            self._asked.others[full] = whole
        return torch.empty([_here(axis) for axis in shape], dtype=dtype or self.dtype, device=_META)

    def mxfp4(self, name: str, expert: ShardAxis, rows: int | ShardAxis, columns: int | ShardAxis) -> Weight:
        n, k = _whole(rows), _whole(columns)
        self._asked.experts[self._prefix + name] = expert.whole, n, k
        return torch.empty(n, k, device=_META)


def _whole(axis: int | ShardAxis) -> int:
    return axis.whole if isinstance(axis, ShardAxis) else axis


def _here(axis: int | ShardAxis) -> int:
    return axis.count if isinstance(axis, ShardAxis) else axis


def asked_of(spec: ModelSpec, config: EngineConfig = DEFAULTS) -> Asked:
    """The tensors of a model, of which nothing but the configuration need be there. Raises `CheckpointError`."""
    asked = Asked()
    unchecked_model(spec, config).build(AskedWeights(spec, asked))
    return asked


def planned_spec(spec: ModelSpec, asked: Asked) -> ModelSpec:
    """The spec with the headers of the tensors that its checkpoint would have, as its `quantization_config` says that
    weights are stored. Raises `CheckpointError` for a method that only the tensors tell of."""
    method = spec.quantization.method
    if method and method not in PLANNED:
        raise CheckpointError(
            f"{spec.config.path}: how weights quantised by {method!r} are stored is told by their tensors alone: give "
            f"the checkpoint's folder; from config.json it is known for {', '.join(PLANNED)}"
        )
    dtype = {"float32": "F32", "float16": "F16"}.get(spec.dtype, "BF16")
    headers: dict[str, TensorHeader] = {}
    for name, shape in asked.others.items():
        headers[name] = _header(dtype, shape)
    for name, (experts, n, k) in asked.experts.items():
        groups = -(-k // _MXFP4)
        headers[f"{name}_blocks"] = _header("U8", (experts, n, groups, _MXFP4 // 2))
        headers[f"{name}_scales"] = _header("U8", (experts, n, groups))
    said = spec.config.table("quantization_config")
    for layer, shape in asked.products.items():
        quantised = is_product(layer) and not _ignored(layer, said)
        parts = _parts(spec, shape) if quantised else None
        for part, header in (parts or {"weight": _header(dtype, shape)}).items():
            headers[f"{layer}.{part}"] = header
    return replace(spec, headers=headers)


def _ignored(layer: str, said: object) -> bool:
    """Whether `quantization_config` leaves a layer dense. Raises `CheckpointError` for an invalid pattern.

    A name there may be that of a layer, of a module that it is in, or of either from some dot on (``self_attn``), with
    ``*`` for any text; of compressed-tensors, a regular expression after ``re:``.
    """
    names = [name for key in ("ignore", "modules_to_not_convert") for name in _listed(said, key)]
    return any(_matches(name, layer) for name in names)


def _matches(name: str, layer: str) -> bool:
    if name.startswith("re:"):
        try:
            return any(re.match(name[3:], spelling) for spelling in spelled_names(layer))
        except re.error as error:
            raise CheckpointError(f"quantization_config ignores {name!r}, which is no pattern: {error}") from None
    # With a dot, as roots that are spelled otherwise end with one.
    full = canonical_name(f"{name.rstrip('.')}.").rstrip(".")
    parts = re.escape(full).replace(r"\*", ".*")
    return re.search(rf"(^|\.){parts}(\.|$)", layer) is not None


def _listed(said: object, key: str) -> Collection[str]:
    value = said.get(key) if isinstance(said, dict) else None
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else ()


def _parts(spec: ModelSpec, shape: tuple[int, int]) -> dict[str, TensorHeader] | None:
    """The tensors of one quantised weight; None where the method leaves it dense."""
    (n, k), quantization = shape, spec.quantization
    if quantization.method == "fp8":
        rows, columns = quantization.block or (n, k)
        scales = (-(-n // rows), -(-k // columns))
        return {"weight": _header("F8_E4M3", shape), "weight_scale_inv": _header("F32", scales)}
    if quantization.method != "compressed-tensors":
        return None
    config, said = spec.config, JsonFields(spec.config.path, spec.config.table("quantization_config"))
    form, groups = said.values.get("format"), [*said.table("config_groups").values()]
    weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], dict) else None
    if form == "pack-quantized" and isinstance(weights, dict) and weights.get("num_bits") in (4, 8):
        size = next(iter(quantization.groups), 0) or k
        packed = _header("I32", (n, -(-k * int(weights["num_bits"]) // 32)))
        return {"weight_packed": packed, "weight_scale": _header("BF16", (n, -(-k // size)))}
    if form == "float-quantized":
        return {"weight": _header("F8_E4M3", shape), "weight_scale": _header("BF16", (n, 1))}
    raise CheckpointError(
        f"{config.path}: compressed-tensors of the format {form!r} are told by their tensors alone: give the "
        "checkpoint's folder; from config.json pack-quantized and float-quantized of one group are known"
    )


def _header(dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    return TensorHeader(Path("planned"), dtype, shape, 0, _WIDTH[dtype] * prod(shape))
