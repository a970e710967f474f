"""Checkpoints as they are published quantised, and the same ones dequantised for the oracle.

`quantise_folder` rewrites the products of a small random checkpoint in one layout, number by number and after the
layout's own description; `Written.plain` is made from the numbers themselves, not by reading back what was written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.family_checkpoint import rewrite_tensors, tensors_of
from tests.support.model_families import FAMILIES

GROUP = 32
PRODUCTS = (
    "_proj.weight",
    *(f".w{number}.weight" for number in (1, 2, 3)),
    "_proj_with_mqa.weight",
    "_proj_qkvz.weight",
    "_proj_qkv.weight",
    "wq_b.weight",
    "wk.weight",
    ".dense.weight",
    ".fc1.weight",
    ".fc2.weight",
    ".c_fc.weight",
)
"""The layers that are quantised, by the ends of their names; gates of recurrent layers and the weights of an indexer's
heads are left dense, as they are in published checkpoints."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, that lies in the first, second, ... four bits of a word of AWQ."""


@dataclass(frozen=True)
class Quantised:
    """One weight [n, k] in whole numbers: (numbers - zeros) * scales, by groups of columns."""

    numbers: Tensor
    """[n, k] int64, from 0."""
    zeros: Tensor
    """[n, groups] int64"""
    scales: Tensor
    """[n, groups], in the dtype that is stored"""
    group_k: Tensor
    """[k] the group of each column"""

    @property
    def plain(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_k], self.scales.float()[:, self.group_k]
        return (self.numbers - zeros).float() * scales


def whole_numbers(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    order: int = 0,
) -> Quantised:
    """Quantise by groups of columns. `order`: a seed by which columns are dealt to the groups; 0: neighbours."""
    n, k = weight.shape
    group_k = torch.arange(k) // group
    if order:
        group_k = group_k[torch.randperm(k, generator=torch.Generator().manual_seed(order))]
    top, scales, zeros = 2**bits - 1, [], []
    for number in range(-(-k // group)):
        columns = weight[:, group_k == number].float()
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        if symmetric:
            largest = torch.maximum(-low, high)
            scales.append((2 * largest / top).to(dtype))
            zeros.append(torch.full((n,), 2 ** (bits - 1)))
        else:
            scales.append(((high - low) / top).to(dtype))
            zeros.append((-low / scales[-1].float()).round().clamp(1, top).long())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).long()
    numbers = (weight.float() / scale.float()[:, group_k] + zero[:, group_k]).round().clamp(0, top).long()
    return Quantised(numbers, zero, scale, group_k)


def words(rows: Tensor, bits: int) -> Tensor:
    """Numbers [r, c] in int32, the first of each 32 / bits in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % each)).view(len(rows), -1, each)
    whole = sum(padded[..., i] << (bits * i) for i in range(each))
    assert isinstance(whole, Tensor)
    return whole.to(torch.int32)


def _packed(weight: Tensor, bits: int = 4, *, symmetric: bool, group: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    found = whole_numbers(weight, bits, group or weight.shape[1], symmetric=symmetric, dtype=torch.bfloat16)
    stored = {
        "weight_packed": words(found.numbers, bits), "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        stored["weight_zero_point"] = words(found.zeros.T, bits).T
    return stored, found.plain


def _int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = whole_numbers(weight, 8, weight.shape[1], symmetric=True, dtype=torch.bfloat16)
    return {"weight": (found.numbers - 128).to(torch.int8), "weight_scale": found.scales}, found.plain


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found = whole_numbers(weight, 4, GROUP)
    columns = [8 * word + place for word in range(len(weight) // 8) for place in AWQ_PLACES]
    return {
        "qweight": words(found.numbers.T[:, columns], 4), "qzeros": words(found.zeros.T[:, columns], 4),
        "scales": found.scales.T,
    }, found.plain  # fmt: skip


def _gptq(weight: Tensor, bits: int = 4, order: int = 0, less: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    found = whole_numbers(weight, bits, GROUP, order=order)
    return {
        "qweight": words(found.numbers, bits).T, "qzeros": words(found.zeros.T - less, bits), "scales": found.scales.T,
        "g_idx": found.group_k.to(torch.int32),
    }, found.plain  # fmt: skip


def _float8(weight: Tensor, rows: int, columns: int, *, e8m0: bool = False, part: str = "weight_scale_inv") -> Any:
    """`rows` and `columns` that share a scale; 0: all."""
    n, k = weight.shape
    rows, columns = rows or n, columns or k
    scales = torch.empty(-(-n // rows), -(-k // columns))
    stored, plain = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale = weight[at].float().abs().max() / 448
            scales[i, j] = scale = torch.exp2(torch.log2(scale).ceil()) if e8m0 else scale
            stored[at] = (weight[at].float() / scale).to(torch.float8_e4m3fn)
            plain[at] = stored[at].float() * scale
    if rows == n and columns == k:
        scales = scales.reshape(())
    return {"weight": stored, part: scales.to(torch.float8_e8m0fnu) if e8m0 else scales}, plain


def _nvfp4(weight: Tensor, *, modelopt: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    parts = weight.float().view(n, k // 16, 16)
    factor = parts.abs().max() / (6 * 448)
    scales = (parts.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    scale = scales.float() * (factor if modelopt else factor.reciprocal().reciprocal())
    ratio = parts / scale.unsqueeze(-1)
    nearest = (ratio.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (ratio < 0)).view(n, k)
    plain = (E2M1[nearest] * ratio.sign() * scale.unsqueeze(-1)).view(n, k)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if modelopt:
        return {"weight": pairs, "weight_scale": scales, "weight_scale_2": factor.reshape(())}, plain
    return {
        "weight_packed": pairs, "weight_scale": scales, "weight_global_scale": factor.reciprocal().reshape(1),
    }, plain  # fmt: skip


def _powers_of_two(weight: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 and MXFP8: a power of two for each 32 columns."""
    n, k = weight.shape
    parts = weight.float().view(n, k // 32, 32)
    exponents = torch.log2(parts.abs().amax(-1) / {4: 6, 8: 448}[bits]).ceil()
    scale = torch.exp2(exponents).unsqueeze(-1)
    stored = {"weight_scale": (exponents + 127).to(torch.uint8)}
    if bits == 8:
        codes = (parts / scale).to(torch.float8_e4m3fn)
        return stored | {"weight": codes.view(n, k)}, (codes.float() * scale).view(n, k)
    nearest = ((parts / scale).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (parts < 0)).view(n, k)
    stored["weight_packed"] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return stored, (E2M1[nearest] * parts.sign() * scale).view(n, k)


def _compressed(form: str, **weights: object) -> dict[str, object]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
    }  # fmt: skip


Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
LAYOUTS: dict[str, tuple[dict[str, object], Writer]] = {
    "packed-int4": (_compressed("pack-quantized"), lambda w: _packed(w, symmetric=True)),
    "packed-int4-zeros": (_compressed("pack-quantized", symmetric=False), lambda w: _packed(w, symmetric=False)),
    "packed-int8-channel": (
        _compressed("pack-quantized", **CHANNEL), lambda w: _packed(w, 8, symmetric=True, group=0),
    ),
    "int8": (_compressed("int-quantized", **CHANNEL), _int8),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, _gptq),
    "gptq-ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        lambda w: _gptq(w, order=7),
    ),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": False}, lambda w: _gptq(w, 8)),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda w: _gptq(w, less=0),
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        lambda w: _float8(w, 16, 32),
    ),
    "fp8-ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"},
        lambda w: _float8(w, 16, 32, e8m0=True),
    ),
    "fp8-tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8"}, lambda w: _float8(w, 0, 0, part="weight_scale")
    ),
    "fp8-channel": (
        _compressed("float-quantized", type="float", **CHANNEL), lambda w: _float8(w, 1, 0, part="weight_scale"),
    ),
    "nvfp4": (_compressed("nvfp4-pack-quantized", type="float", group_size=16), _nvfp4),
    "mxfp4": (
        _compressed("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8"), lambda w: _powers_of_two(w, 4),
    ),
    "mxfp8": (
        _compressed("mxfp8-quantized", type="float", num_bits=8, scale_dtype="torch.uint8"),
        lambda w: _powers_of_two(w, 8),
    ),
    "nvfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda w: _nvfp4(w, modelopt=True)),
}  # fmt: skip
"""What `config.json` says, and the writer of a weight, by layout."""


@dataclass(frozen=True)
class Written:
    stored: Path
    """The folder with quantised weights."""
    plain: Path
    """The same one with the weights that they stand for, in float32."""


def quantise_folder(folder: Path, layout: str, to: Path) -> Written:
    """Write both folders below `to`, of one of `tests.support.model_families`; only products of layers change."""
    said, write = LAYOUTS[layout]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors_of(folder).items():
        left = not name.endswith(PRODUCTS) or name.endswith("weights_proj.weight")
        if left or tensor.dim() != 2 or min(tensor.shape) < GROUP:
            stored[name] = plain[name] = tensor.float()
            continue
        parts, plain[name] = write(tensor)
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    for path, tensors in ((to / "stored", stored), (to / "plain", plain)):
        shutil.copytree(folder, path)
        rewrite_tensors(path, tensors)
        config = json.loads((path / "config.json").read_text())
        config |= {"dtype": "float32"} | ({"quantization_config": said} if path.name == "stored" else {})
        (path / "config.json").write_text(json.dumps(config))
    return Written(to / "stored", to / "plain")


class QuantisedFolders:
    """Folders of families in one of `LAYOUTS`, each written once, below `base`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: dict[tuple[str, str], Written] = {}

    def __call__(self, layout: str, family: str = "llama", **options: Any) -> Written:
        """`options` are those of the family's maker, which count when it is first asked for."""
        key = (layout, family)
        if key not in self._made:
            folder = self._base / family
            if not folder.exists():
                FAMILIES[family](folder, **options)
            self._made[key] = quantise_folder(folder, layout, self._base / f"{family}-{layout}")
        return self._made[key]


def quantised_names(folder: Path) -> Iterator[str]:
    """The layers of a folder that are stored in blocks."""
    for name in tensors_of(folder):
        layer, _, part = name.rpartition(".")
        if part in {"weight_scale", "weight_scale_inv", "qweight"}:
            yield layer
