"""Readers of quantised weights: how published checkpoints lay a weight [n, k] out, as a `BlockWeight`.

Which layout a weight has is told by the tensors that are there and by their dtypes and shapes: layers that a
checkpoint leaves dense (`ignore`, `modules_to_not_convert`) have a plain ``weight``. `config.json` names the method,
and what can't be seen in the tensors (`twinpool.contracts.checkpoint.quantization`).

| layout | tensors beside their shapes |
|---|---|
| fp8 (DeepSeek, Qwen; compressed-tensors, ModelOpt, FBGEMM) | ``weight`` float8 [n, k]; ``weight_scale_inv`` or ``weight_scale``: one, [n, 1], or one a block of rows and columns |
| int8 (compressed-tensors) | ``weight`` int8 [n, k]; ``weight_scale`` as above; ``weight_zero_point`` |
| packed integers (compressed-tensors) | ``weight_packed`` int32 [n, k * bits / 32]; ``weight_scale`` [n, groups]; ``weight_zero_point`` int32 [n * bits / 32, groups]; ``weight_g_idx`` [k] |
| NVFP4 (compressed-tensors, ModelOpt) | ``weight_packed`` or ``weight`` uint8 [n, k / 2]; ``weight_scale`` float8 [n, k / 16]; ``weight_global_scale`` (a divisor) or ``weight_scale_2`` (a factor) |
| MXFP4 and MXFP8 (compressed-tensors) | ``weight_packed`` uint8 [n, k / 2], or ``weight`` float8 [n, k]; ``weight_scale`` uint8 [n, k / 32], powers of two |
| AWQ | ``qweight`` int32 [k, n * bits / 32], columns interleaved; ``qzeros`` [groups, n * bits / 32]; ``scales`` [groups, n] |
| GPTQ | ``qweight`` int32 [k * bits / 32, n]; ``qzeros`` [groups, n * bits / 32]; ``scales`` [groups, n]; ``g_idx`` [k] |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.quantization import Quantization
from twinpool.contracts.checkpoint.safetensors_headers import TensorHeader
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.weight_formats.block_weight import BlockWeight, Code, pack_codes

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place, in an int32 of AWQ, of the column that is the first, second, ... of eight."""
_WORD_BITS = 32


@dataclass(frozen=True)
class StoredWeight:
    """The stored tensors of one weight, by the last part of their names (``weight_scale``); whole, not read yet."""

    name: str
    """The layer's full name, ``model.layers.0.mlp.up_proj``."""
    shape: tuple[int, int]
    """[n, k], as the model asks for it."""
    dtypes: dict[str, str]
    """The dtype of each, as safetensors names it."""
    take: Callable[[str], Tensor]
    """Reads a tensor; raises `CheckpointError` where it isn't there."""
    quantization: Quantization
    dtype: torch.dtype
    """The dtype to compute in."""

    def shaped(self, part: str, *shapes: tuple[int, ...]) -> Tensor:
        """A tensor that must have one of these shapes."""
        found = self.take(part)
        if tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{self.name}.{part} has shape {list(found.shape)}, which must be {wanted}")
        return found

    def blocks(self, code: Code, codes: Tensor, scales: Tensor, group: int, **rest: object) -> BlockWeight:
        return BlockWeight(code, codes, scales.contiguous(), group, self.dtype, **rest)  # type: ignore[arg-type]

    def group(self, count: int, part: str) -> int:
        """Columns of a group, where each row has so many: of the sizes that `config.json` names; else equal parts."""
        k = self.shape[1]
        sizes = {size or k for size in self.quantization.groups if count == -(-k // (size or k))}
        if not sizes and not k % max(count, 1):
            sizes = {k // max(count, 1)}
        if len(sizes) != 1:
            said = ", ".join(str(size or "a row") for size in self.quantization.groups) or "none"
            raise CheckpointError(
                f"{self.name}.{part} has {count} groups of {k} columns; config.json has the group sizes: {said}"
            )
        return sizes.pop()


PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_g_idx", "weight_shape", "qweight", "qzeros", "scales", "g_idx"),
)
"""The tensors that a weight may be stored as, by the last parts of their names."""


_QUANTISED_PARTS = frozenset(PARTS) - {"weight", "weight_shape", "g_idx", "weight_g_idx"}
_QUANTISED_DTYPES = frozenset({"F8_E4M3", "I8", "U8"})


def quantised_layers(headers: Mapping[str, TensorHeader]) -> frozenset[str]:
    """The layers of which a weight is stored in blocks, by the names and dtypes of a checkpoint's tensors."""
    found = set()
    for name, header in headers.items():
        layer, _, part = name.rpartition(".")
        if part in _QUANTISED_PARTS or (part == "weight" and header.dtype in _QUANTISED_DTYPES):
            found.add(layer)
    return frozenset(found)


def read_blocks(stored: StoredWeight) -> BlockWeight | None:
    """Read a whole weight that is stored in blocks; None for one that is dense, or missing.

    Raises `CheckpointError`, which names the tensor, for one that is missing, has another shape, or holds a scale that
    is zero or no number.
    """
    reader = _reader(stored)
    if reader is None:
        return None
    weight = reader(stored)
    if weight.shape != stored.shape:
        raise CheckpointError(
            f"{stored.name} is stored with {list(weight.shape)} elements, and must have {list(stored.shape)}"
        )
    weight.check(stored.name)
    return weight


def _reader(stored: StoredWeight) -> Callable[[StoredWeight], BlockWeight] | None:
    dtypes = stored.dtypes
    if "qweight" in dtypes:
        return _awq if stored.quantization.method == "awq" else _gptq
    if "weight_packed" in dtypes:
        return _four_bit_floats if dtypes["weight_packed"] == "U8" else _packed_integers
    kinds = {"F8_E4M3": _fp8, "I8": _int8, "U8": _four_bit_floats}
    return kinds.get(dtypes.get("weight", ""))


def _by_row(stored: StoredWeight, part: str) -> tuple[Tensor, int]:
    """The scales [n, groups] of a weight that has one scale, one a row, or one a block of rows and columns; and how
    many columns a group has."""
    n, k = stored.shape
    scales = _as_scales(stored.take(part))
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1), k
    if tuple(scales.shape) in {(n,), (n, 1)}:
        return scales.reshape(n, 1), k
    rows, columns = stored.quantization.block or (1, 0)
    group = columns or (-(-k // scales.shape[-1]) if scales.dim() == 2 else 0)
    wanted = (-(-n // rows), -(-k // max(group, 1)))
    if tuple(scales.shape) != wanted or not group:
        raise CheckpointError(
            f"{stored.name}.{part} has shape {list(scales.shape)}; a weight of {[n, k]} has one scale, {[n, 1]}, or "
            f"{list(wanted)} for blocks of {[rows, group]}"
        )
    return scales.repeat_interleave(rows, 0)[:n], group


def _as_scales(scales: Tensor) -> Tensor:
    """Scales in a dtype that `BlockWeight` takes: E8M0 as its bytes."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def _fp8(stored: StoredWeight) -> BlockWeight:
    part = next((p for p in ("weight_scale_inv", "weight_scale") if p in stored.dtypes), "weight_scale")
    scales, group = _by_row(stored, part)
    return stored.blocks(Code.E4M3, stored.shaped("weight", stored.shape).view(torch.uint8), scales, group)


def _int8(stored: StoredWeight) -> BlockWeight:
    scales, group = _by_row(stored, "weight_scale")
    signed = stored.shaped("weight", stored.shape)
    zeros = None
    if "weight_zero_point" in stored.dtypes:
        points, _ = _by_row(stored, "weight_zero_point")
        zeros = points.to(torch.int16).add(128).to(torch.uint8)
    codes = signed.view(torch.uint8) ^ 128  # Two's complement, plus 128.
    return stored.blocks(Code.UINT8, codes, scales, group, zeros=zeros, zero=0 if zeros is not None else 128)


def _packed_integers(stored: StoredWeight) -> BlockWeight:
    """compressed-tensors: along a row, the first column in the lowest bits, each number plus half the range."""
    n, k = stored.shape
    packed = stored.take("weight_packed")
    code = _code(stored, packed.shape[-1] * _WORD_BITS // max(k, 1), "weight_packed")
    words = -(-k * code.bits // _WORD_BITS)
    codes = _unpacked(stored.shaped("weight_packed", (n, words)), code.bits)[:, :k]
    scales = stored.take("weight_scale")
    group = k if scales.numel() == 1 else stored.group(scales.shape[-1], "weight_scale")
    scales = stored.shaped("weight_scale", (1,), (n, -(-k // group))).reshape(-1, -(-k // group)).expand(n, -1)
    zeros = None
    if stored.dtypes.get("weight_zero_point") == "I8":  # Not packed, as older files have them.
        points = stored.shaped("weight_zero_point", tuple(scales.shape))
        zeros = (points.to(torch.int16) + 2 ** (code.bits - 1)).to(torch.uint8)
    elif "weight_zero_point" in stored.dtypes:
        points = stored.shaped("weight_zero_point", (-(-n * code.bits // _WORD_BITS), scales.shape[1]))
        zeros = _unpacked(points.T.contiguous(), code.bits)[:, :n].T.contiguous()
    zero = 0 if zeros is not None else 2 ** (code.bits - 1)
    order = None
    if "weight_g_idx" in stored.dtypes:
        order = _order(stored, "weight_g_idx", group)
        codes = codes if order is None else codes[:, order]
    return stored.blocks(code, pack_codes(codes, code), scales, group, zeros=zeros, zero=zero, order_k=order)


def _four_bit_floats(stored: StoredWeight) -> BlockWeight:
    """NVFP4; MXFP4 where scales are uint8, powers of two."""
    n, k = stored.shape
    part = "weight_packed" if "weight_packed" in stored.dtypes else "weight"
    if stored.dtypes.get("weight_scale") in {"U8", "F8_E8M0"}:
        scales = _as_scales(stored.shaped("weight_scale", (n, k // 32)))
        return stored.blocks(Code.E2M1, stored.shaped(part, (n, k // 2)), scales, 32)
    codes, scales = stored.shaped(part, (n, k // 2)), stored.shaped("weight_scale", (n, k // 16))
    if "weight_scale_2" in stored.dtypes:
        factor = stored.take("weight_scale_2").float().reshape(1)
    else:
        factor = stored.take("weight_global_scale").float().reshape(1).reciprocal()
    return stored.blocks(Code.E2M1, codes, scales, 16, factors=factor.expand(n, 1).contiguous())


def _awq(stored: StoredWeight) -> BlockWeight:
    n, k = stored.shape
    columns = torch.tensor(AWQ_COLUMNS)

    def by_row(part: str, rows: int) -> Tensor:
        words = _unpacked(stored.shaped(part, (rows, n // 8)), 4).view(rows, n // 8, 8)
        return words[..., columns.to(words.device)].reshape(rows, n).T.contiguous()

    scales = stored.take("scales")
    groups = scales.shape[0]
    stored.shaped("scales", (groups, n))
    zeros = by_row("qzeros", groups)
    codes = pack_codes(by_row("qweight", k), Code.UINT4)
    return stored.blocks(Code.UINT4, codes, scales.T, stored.group(groups, "scales"), zeros=zeros)


def _gptq(stored: StoredWeight) -> BlockWeight:
    n, k = stored.shape
    code = _code(stored, stored.quantization.bits, "qweight")
    words = -(-k * code.bits // _WORD_BITS)
    codes = _unpacked(stored.shaped("qweight", (words, n)).T.contiguous(), code.bits)[:, :k]
    scales = stored.take("scales")
    groups = scales.shape[0]
    stored.shaped("scales", (groups, n))
    points = _unpacked(stored.shaped("qzeros", (groups, n * code.bits // _WORD_BITS)), code.bits)
    zeros = (points + stored.quantization.added_zero).T.contiguous()
    group = stored.group(groups, "scales")
    order = _order(stored, "g_idx", group) if "g_idx" in stored.dtypes else None
    codes = codes if order is None else codes[:, order]
    return stored.blocks(code, pack_codes(codes, code), scales.T, group, zeros=zeros, order_k=order)


def _order(stored: StoredWeight, part: str, group: int) -> Tensor | None:
    """The order of columns in which those of a group lie together, [k]; None where they do already."""
    k = stored.shape[1]
    groups = stored.shaped(part, (k,))
    if groups.device.type == "meta":
        return None
    wanted = torch.arange(k) // group
    if torch.equal(groups.long(), wanted):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], wanted):
        raise CheckpointError(f"{stored.name}.{part} must put {group} columns into each group")
    return order


def _code(stored: StoredWeight, bits: int, part: str) -> Code:
    if bits not in (4, 8):
        raise CheckpointError(f"{stored.name}.{part} holds numbers of {bits} bits; supported are 4 and 8")
    return Code.UINT4 if bits == 4 else Code.UINT8


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 words [r, c] as the codes in them, the lowest bits first: uint8 [r, c * 32 / bits]."""
    shifts = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
    codes: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)
