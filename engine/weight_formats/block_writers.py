"""Writers of quantised weights: a dense weight [n, k], laid out as a published checkpoint has it.

The other way round of `block_formats`, for `convert_checkpoint`. Numbers are the nearest ones to the weight, for scales
as they are stored; nothing is calibrated. Columns are quantised in groups, each with a scale; where all of a group's
numbers are zero its scale is 1 (NVFP4: 0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.engine.weight_formats.block_formats import AWQ_COLUMNS
from twinpool.engine.weight_formats.block_weight import E2M1_VALUES

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""The tensors of a weight: the last part of each one's name, its dtype as safetensors names it, and its shape."""
_FLOAT8_BLOCK = 128
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_NVFP4_GROUP, _MX_GROUP = 16, 32
_E8M0_BIAS = 127
_FLOAT16_TINY = 2.0**-24
"""The smallest float16 that isn't zero."""
_HALVES = tuple((low + high) / 2 for low, high in pairwise(E2M1_VALUES[:8]))
"""The borders between neighbouring numbers of a four-bit float; a number on one is the lower one's."""


@dataclass(frozen=True)
class BlockLayout:
    """A layout of quantised weights, as `twinpool convert` writes it."""

    shapes: Callable[[int, int, int], Shapes]
    """The tensors of a weight [n, k] with groups of so many columns, in the order in which they are written."""
    write: Callable[[Tensor, int], Sequence[Tensor]]
    """These tensors of a weight [n, k] in float32."""
    config: Callable[[int, Sequence[str]], dict[str, object]]
    """The `quantization_config` for groups of so many columns and the layers that were left dense."""
    group: int | None = None
    """Columns of a group; None: as the operator chooses; 0: any number of columns can be written."""
    rows: int = 1
    """A weight's rows must be a multiple of it, or the weight stays dense."""

    def fits(self, n: int, k: int, chosen: int) -> bool:
        """Whether a weight [n, k] can be written, where the operator chose groups of so many columns."""
        group = self.columns(chosen)
        return not n % self.rows and (not group or not k % group)

    def columns(self, chosen: int) -> int:
        return chosen if self.group is None else self.group


# ------------------------------------------------------------ fp8


def _float8_shapes(n: int, k: int, group: int) -> Shapes:
    scales = (-(-n // _FLOAT8_BLOCK), -(-k // _FLOAT8_BLOCK))
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", scales)}


def float8_blocks(weight_nk: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """A weight as e4m3 [n, k], and a float32 scale for each 128 rows and columns: its largest number has the largest
    code."""
    n, k = weight_nk.shape
    padded = F.pad(weight_nk, (0, -k % _FLOAT8_BLOCK, 0, -n % _FLOAT8_BLOCK))
    across, down = padded.shape[0] // _FLOAT8_BLOCK, padded.shape[1] // _FLOAT8_BLOCK
    blocks = padded.view(across, _FLOAT8_BLOCK, down, _FLOAT8_BLOCK)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / _E4M3_MAX, 1.0)
    codes = (blocks / scales[:, None, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return codes.view(padded.shape)[:n, :k].to(torch.float8_e4m3fn).contiguous(), scales


def _float8_config(group: int, left: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [_FLOAT8_BLOCK, _FLOAT8_BLOCK], "modules_to_not_convert": list(left),
    }  # fmt: skip


# ------------------------------------------------------------ compressed-tensors


def _packed_shapes(bits: int, n: int, k: int, group: int) -> Shapes:
    return {
        "weight_packed": ("I32", (n, k * bits // 32)),
        "weight_scale": ("BF16", (n, k // group)),
        "weight_shape": ("I64", (2,)),
    }


def packed_integers(weight_nk: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight as compressed-tensors packs it: int32 [n, k * bits / 32], the first column in the lowest bits, each
    number plus half the range; a bfloat16 scale for each `group` columns, [n, k / group]; and the shape."""
    numbers, scales = _symmetric(weight_nk, bits, group, torch.bfloat16)
    return _words(numbers, bits), scales, torch.tensor(weight_nk.shape)


def _nvfp4_shapes(n: int, k: int, group: int) -> Shapes:
    return {
        "weight_packed": ("U8", (n, k // 2)),
        "weight_scale": ("F8_E4M3", (n, k // group)),
        "weight_global_scale": ("F32", (1,)),
    }


def nvfp4(weight_nk: Tensor, group: int = _NVFP4_GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in four-bit floats, two to a byte, uint8 [n, k / 2]; an e4m3 scale for each 16 columns, [n, k / 16]; and
    what scales are divided by, [1]: the largest of them has the largest code."""
    n, k = weight_nk.shape
    grouped = weight_nk.view(n, k // group, group)
    largest = grouped.abs().amax(-1)
    whole = largest.max()
    divisor = torch.where(whole > 0, _E2M1_MAX * _E4M3_MAX / whole, 1.0).reshape(1)
    scales = (largest / _E2M1_MAX * divisor).clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    return _four_bit_floats(grouped, scales.float() * divisor.reciprocal()), scales, divisor


def _mxfp4_shapes(n: int, k: int, group: int) -> Shapes:
    return {"weight_packed": ("U8", (n, k // 2)), "weight_scale": ("U8", (n, k // group))}


def mxfp4(weight_nk: Tensor, group: int = _MX_GROUP) -> tuple[Tensor, Tensor]:
    """A weight in four-bit floats, two to a byte, uint8 [n, k / 2]; and for each 32 columns a power of two, its
    exponent plus 127, uint8 [n, k / 32]."""
    exponents = _powers(weight_nk, group, largest_power=2)
    n, k = weight_nk.shape
    packed = _four_bit_floats(weight_nk.view(n, k // group, group), torch.exp2(exponents))
    return packed, (exponents + _E8M0_BIAS).to(torch.uint8)


def _mxfp8_shapes(n: int, k: int, group: int) -> Shapes:
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("U8", (n, k // group))}


def mxfp8(weight_nk: Tensor, group: int = _MX_GROUP) -> tuple[Tensor, Tensor]:
    """A weight as e4m3 [n, k]; and for each 32 columns a power of two, its exponent plus 127, uint8 [n, k / 32]."""
    exponents = _powers(weight_nk, group, largest_power=8)
    n, k = weight_nk.shape
    numbers = weight_nk.view(n, k // group, group) / torch.exp2(exponents).unsqueeze(-1)
    codes = numbers.clamp_(-_E4M3_MAX, _E4M3_MAX).view(n, k).to(torch.float8_e4m3fn)
    return codes, (exponents + _E8M0_BIAS).to(torch.uint8)


def _compressed_config(form: str, weights: Mapping[str, object], group: int, left: Sequence[str]) -> dict[str, object]:
    scheme = {"strategy": "group", "symmetric": True, "group_size": group, **weights}
    of_group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": of_group}, "ignore": list(left),
    }  # fmt: skip


# ------------------------------------------------------------ AWQ and GPTQ


def _awq_shapes(n: int, k: int, group: int) -> Shapes:
    words = n // 8
    return {
        "qweight": ("I32", (k, words)),
        "qzeros": ("I32", (k // group, words)),
        "scales": ("F16", (k // group, n)),
    }


def awq(weight_nk: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight as AWQ's `gemm` version lies: numbers of four bits, int32 [k, n / 8]; their zero points, int32 [k /
    group, n / 8]; float16 scales [k / group, n]. A group's numbers reach from its smallest weight to its largest."""
    n, k = weight_nk.shape
    grouped = weight_nk.view(n, k // group, group)
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    scales = _float16_scales(high - low, 15)
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    numbers = (grouped / scales.float().unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15)
    places = torch.tensor(AWQ_COLUMNS).argsort()

    def words(rows: Tensor) -> Tensor:
        return _words(rows.to(torch.int64).view(len(rows), n // 8, 8)[..., places].reshape(len(rows), n), 4)

    return words(numbers.view(n, k).T), words(zeros.T), scales.T


def _awq_config(group: int, left: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": list(left),
    }  # fmt: skip


def _gptq_shapes(bits: int, n: int, k: int, group: int) -> Shapes:
    return {
        "qweight": ("I32", (k * bits // 32, n)),
        "qzeros": ("I32", (k // group, n * bits // 32)),
        "scales": ("F16", (k // group, n)),
        "g_idx": ("I32", (k,)),
    }


def gptq(weight_nk: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight as GPTQ's first version lies: numbers, int32 [k * bits / 32, n]; their zero points less one, half the
    range for all, int32 [k / group, n * bits / 32]; float16 scales [k / group, n]; the group of each column, int32 [k].

    GPTQ's own choice of numbers, by what they do to a sample of activations, isn't made."""
    n, k = weight_nk.shape
    numbers, scales = _symmetric(weight_nk, bits, group, torch.float16)
    zeros = torch.full((k // group, n), 2 ** (bits - 1) - 1)
    return _words(numbers, bits).T, _words(zeros, bits), scales.T, (torch.arange(k) // group).to(torch.int32)


def _gptq_config(bits: int, group: int, left: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "lm_head": False,
        "dynamic": {f"-:^{re.escape(layer)}$": {} for layer in left if layer != "lm_head"},
    }  # fmt: skip


# ------------------------------------------------------------ arithmetic of several


def _symmetric(weight_nk: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Whole numbers [n, k] plus half the range, int64, without the lowest of the range; and a scale for each group."""
    n, k = weight_nk.shape
    top = 2 ** (bits - 1) - 1
    grouped = weight_nk.view(n, k // group, group)
    largest = grouped.abs().amax(-1)
    scales = _float16_scales(largest, top) if dtype == torch.float16 else _nonzero(largest / top).to(dtype)
    numbers = (grouped / scales.float().unsqueeze(-1)).round_().clamp_(-top, top).to(torch.int64).add_(top + 1)
    return numbers.view(n, k), scales


def _float16_scales(span: Tensor, steps: int) -> Tensor:
    """Scales that divide spans into so many steps: float16, none zero and none infinite."""
    largest = torch.finfo(torch.float16).max
    return _nonzero(span / steps).clamp_(_FLOAT16_TINY, largest).to(torch.float16)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _words(rows: Tensor, bits: int) -> Tensor:
    """Numbers [r, c] of so many bits as int32 words [r, c * bits / 32], the first in the lowest bits."""
    each = 32 // bits
    shifts = torch.arange(0, 32, bits)
    return (rows.reshape(rows.shape[0], -1, each) << shifts).sum(-1).to(torch.int32)


def _powers(weight_nk: Tensor, group: int, largest_power: int) -> Tensor:
    """The exponents of scales by powers of two, float32 [n, k / group]: a group's largest number comes to lie below the
    format's largest power of two times 1.75, or is cut to its largest number."""
    n, k = weight_nk.shape
    largest = weight_nk.view(n, k // group, group).abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # The mantissa is 0.5 or more, and less than 1.
    exponent = exponent - 1 - largest_power + (mantissa >= 0.875).to(exponent.dtype)
    return torch.where(largest > 0, exponent, 0).clamp_(-_E8M0_BIAS, _E8M0_BIAS).float()


def _four_bit_floats(grouped: Tensor, scales: Tensor) -> Tensor:
    """The nearest codes of numbers [n, groups, group] divided by scales [n, groups], the even column in the low half of
    a byte, uint8 [n, k / 2]; code 0 where a scale is zero."""
    ratio = torch.where(scales > 0, 1 / scales, 0.0).unsqueeze(-1) * grouped
    codes = torch.bucketize(ratio.abs(), torch.tensor(_HALVES)) + 8 * (ratio < 0)
    codes = codes.view(len(grouped), -1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


# ------------------------------------------------------------ all of them

_FP4 = {"num_bits": 4, "type": "float"}
_POWERS = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_NVFP4_SCALES = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}


def _integers(bits: int) -> BlockLayout:
    return BlockLayout(
        partial(_packed_shapes, bits),
        lambda weight, group: packed_integers(weight, bits, group),
        partial(_compressed_config, "pack-quantized", {"num_bits": bits, "type": "int"}),
    )


def _gptq_layout(bits: int) -> BlockLayout:
    return BlockLayout(
        partial(_gptq_shapes, bits),
        lambda weight, group: gptq(weight, bits, group),
        partial(_gptq_config, bits),
        rows=32 // bits,
    )


LAYOUTS: Mapping[str, BlockLayout] = {
    "float8": BlockLayout(_float8_shapes, float8_blocks, _float8_config, group=0),
    "int8": _integers(8),
    "int4": _integers(4),
    "nvfp4": BlockLayout(
        _nvfp4_shapes, nvfp4, partial(_compressed_config, "nvfp4-pack-quantized", _FP4 | _NVFP4_SCALES), _NVFP4_GROUP
    ),
    "mxfp4": BlockLayout(
        _mxfp4_shapes, mxfp4, partial(_compressed_config, "mxfp4-pack-quantized", _FP4 | _POWERS), _MX_GROUP
    ),
    "mxfp8": BlockLayout(
        _mxfp8_shapes,
        mxfp8,
        partial(_compressed_config, "mxfp8-quantized", {"num_bits": 8, "type": "float", **_POWERS}),
        _MX_GROUP,
    ),
    "awq": BlockLayout(_awq_shapes, awq, _awq_config, rows=8),
    "gptq4": _gptq_layout(4),
    "gptq8": _gptq_layout(8),
}
"""The layouts by the names that `--weights` gives them."""
