"""The compiled C++ kernels as functions on tensors.

All tensors are on the CPU, in float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twinpool.engine.weight_formats.block_weight import INPUT_BLOCK, BlockStack, BlockWeight, Code, unpack_codes

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PANEL = 32
"""Outputs side by side in a packed weight, as in gemm.h."""
_MAX_HEAD_DIM = 1024
_HUGE_PAGE = 1 << 21
_LINE = 64
_MAPPING = 1 << 26
"""Bytes of a mapping that weights share."""
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MADV_HUGEPAGE = 14


class _Heads(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("tokens", "heads", "kv_heads", "dim", "turning")]
    _fields_ += [("eps", ctypes.c_float)]


class AttentionShape(ctypes.Structure):
    """The shape of one call of `attend`: the struct of attention.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "dim", "page_tokens", "value_dim")),
        ("table_width", ctypes.c_long),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("window", ctypes.c_long),
    ]


class LowRank(ctypes.Structure):
    """One layer's factors of one adapter: the struct of low_rank.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("down", "up")),
        *((name, ctypes.c_long) for name in ("rank", "n", "column", "at")),
    ]


LOW_RANK_RANKS, LOW_RANK_COLUMNS, LOW_RANK_OUTPUTS = 4, 32, 64
"""`RANKS`, `COLUMNS` and `OUTPUTS` of low_rank.h, to multiples of which factors are padded."""


class _Pages(ctypes.Structure):
    """Keys and values of all pages: the struct of attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("stored", ctypes.c_int32),
    ]


_STORED = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""`enum Stored` of attention.h: how codes are stored; 0: keys and values are in the queries' dtype."""


BLOCK_PARTS = ("zeros", "scales", "offsets", "factors", "offset_factors")
"""The parts of a `BlockWeight` that kernels read beside codes, in the order of the struct of block_gemm.h."""


class _Blocks(ctypes.Structure):
    """A packed weight in blocks: the struct of block_gemm.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("n", "k", "group", "span", "groups", "spans")),
        *((name, ctypes.c_int32) for name in ("code", "scale_type", "zero")),
        *((name, ctypes.c_void_p) for name in ("codes", *BLOCK_PARTS)),
    ]


_SCALE_TYPES = {dtype: number for number, dtype in enumerate(
    (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int8)
)}  # fmt: skip
"""`enum ScaleType` of block_gemm.h."""
_PAIRED = len(_SCALE_TYPES)
_UINT4_OFFSET = len(Code)
"""The code of `enum Code` for `UINT4` with offsets."""
_WITH_OFFSETS = (Code.UINT2, Code.UINT3, Code.UINT4, Code.UINT5, Code.UINT6)
_PACKED_AT_ONCE = 4 << 20
"""Codes that are unpacked at once to be packed, about."""
_SIGNATURES = {
    "rms_norm": "plplpllf",
    "silu_product": "ppll",
    "rope_and_store": "pplpppppp" + "ppl",
    "attend": "plpppppppp",
    "conv": "ppplpppp",
    "scan": "ppp",
    "add_low_rank": "pllpplpllplpl",
    "packed_elements": "ll",
    "pack": "ppll",
    "product": "plpppllll",
    "block_product": "pplppll",
    "block_rows": "pplp",
    "int8_product": "pplpplll",
    "int8_rows": "pplp",
}
_RETURNING = {"packed_elements", "block_rows", "int8_rows"}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}


class _Threads(threading.local):
    threads = 0
    """The number that was set for this thread; 0: none yet."""


class NativeKernels:
    """The kernels of one loaded library. They run on as many threads as torch does, once `begin` was called on the
    thread that calls them."""

    wide_norms = False
    devices, dtypes = ("cpu",), tuple(_NAMES)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._set_threads: Callable[[int], None] = library.set_threads
        self._set_threads.argtypes, self._set_threads.restype = [ctypes.c_int], None
        self._pack_codes, self._pack_int8_codes = library.pack_codes, library.pack_int8_codes
        for pack in (self._pack_codes, self._pack_int8_codes):
            pack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
            pack.restype = None
        self._local = _Threads()
        self.functions: dict[tuple[str, torch.dtype], Any] = {}
        """The library's functions, by name and dtype."""
        for dtype, suffix in _NAMES.items():
            for name, types in _SIGNATURES.items():
                function = getattr(library, f"{name}_{suffix}", None)
                if function is not None:
                    function.argtypes = [_TYPES[letter] for letter in types]
                    function.restype = ctypes.c_long if name in _RETURNING else None
                    self.functions[name, dtype] = function

    def begin(self) -> None:
        """Have this thread's calls run on as many threads as torch's operations do."""
        threads = torch.get_num_threads()
        if self._local.threads != threads:
            self._set_threads(threads)
            self._local.threads = threads

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether products of this dtype are these kernels': all of `dtypes`."""
        return dtype in self.dtypes

    def packed(self, weight_nk: Tensor, bias_n: Tensor | None) -> PackedWeight:
        return PackedWeight(self, weight_nk, bias_n)

    def packed_blocks(self, weight: BlockWeight | BlockStack, bias_n: Tensor | None) -> PackedBlocks | StackedBlocks:
        if isinstance(weight, BlockStack):
            return StackedBlocks(self, weight, bias_n)
        return PackedBlocks(self, weight, bias_n)

    def packed_heads(self, weight_hkn: Tensor) -> PackedHeads:
        return PackedHeads(self, weight_hkn)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis, [..., n]; `weight` is [n], or [rows, n] where x is [..., rows, n].

        Computed in float32, and rounded before the product with the weight.
        """
        width = x.shape[-1]
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x.numel() // width if width else 0
        stride = x.stride(0) if x.dim() == 2 else width
        self.functions["rms_norm", x.dtype](
            x.data_ptr(), stride, weight.data_ptr(), weight.numel() // width, out.data_ptr(), rows, width, eps
        )
        return out

    def add_rms_norm(self, x_mn: Tensor, added_mn: Tensor, weight_n: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``x + added`` and its norm, one after the other."""
        total_mn = x_mn + added_mn
        return total_mn, self.rms_norm(total_mn, weight_n, eps)

    def square_sum(self, x: Tensor) -> Tensor:
        """The sums of the squares of the last axis, in float32: torch's own, which are row-exact on a CPU."""
        return x.float().square().sum(-1)

    def silu_product(self, gate_up_mn: Tensor) -> Tensor:
        """silu(gate) * up, [M, n], of gate and up side by side, [M, 2n]; silu is computed in float32 and rounded."""
        gate_up_mn = gate_up_mn.contiguous()
        rows, width = gate_up_mn.shape[0], gate_up_mn.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up_mn.dtype)
        self.functions["silu_product", out.dtype](gate_up_mn.data_ptr(), out.data_ptr(), rows, width)
        return out

    def rope_and_store(
        self,
        qkv_mn: Tensor,
        norm_nd: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots_t: Tensor,
        muted_t: Tensor | None,
        heads: int,
    ) -> Tensor:
        """Norm (where there is one) and rotate queries and keys, and write keys and values to their slots.

        `qkv_mn` is [M, (heads + 2 kv_heads) * dim], of which the first T rows are used; `norm_nd` [heads + kv_heads,
        dim]; `cos` and `sin` [M, 1, rope_dim], the first half of sin negated, turn a head's first dimensions; pages
        [pages, page_tokens, kv_heads, dim]; `slots_t` [T] int64; muted tokens ([T] bool) are written as zeros. Returns
        the queries, [T, heads, dim].
        """
        tokens, (kv_heads, dim) = slots_t.shape[0], k_pages.shape[2:]
        assert dim <= _MAX_HEAD_DIM and qkv_mn.stride(1) == 1, "heads fit the kernel's room"  # noqa: PT018
        assert k_pages.is_contiguous() and v_pages.is_contiguous(), "pages follow each other"  # noqa: PT018
        q_thd = torch.empty(tokens, heads, dim, dtype=qkv_mn.dtype)
        shape = _Heads(tokens, heads, kv_heads, dim, cos.shape[-1], eps)
        cos, sin = cos.contiguous(), sin.contiguous()
        self.functions["rope_and_store", qkv_mn.dtype](
            ctypes.addressof(shape),
            qkv_mn.data_ptr(),
            qkv_mn.stride(0),
            None if norm_nd is None else norm_nd.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            q_thd.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            slots_t.data_ptr(),
            None if muted_t is None else muted_t.data_ptr(),
            kv_heads * dim,
        )
        return q_thd

    def attend(
        self,
        shape: AttentionShape,
        q_thd: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        tables_bp: Tensor,
        firsts_b: Tensor | None,
        starts_b: Tensor,
        offsets_b: Tensor,
        sinks_h: Tensor | None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Paged causal attention, [T, heads, value_dim]; integers are int32, sinks float32, all contiguous.

        Values lie as keys do: in pages of their own, or as the first part of each key. `scales`: those of keys and of
        values, bfloat16, where both are codes.
        """
        k_scales, v_scales = (None, None) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())
        stored = 0 if scales is None else _STORED[k_pages.dtype]
        pages = _Pages(k_pages.data_ptr(), v_pages.data_ptr(), k_scales, v_scales, stored)
        out = q_thd.new_empty(*q_thd.shape[:2], shape.value_dim)
        self.functions["attend", q_thd.dtype](
            ctypes.addressof(shape),
            starts_b.shape[0],
            q_thd.data_ptr(),
            ctypes.addressof(pages),
            tables_bp.data_ptr(),
            None if firsts_b is None else firsts_b.data_ptr(),
            starts_b.data_ptr(),
            offsets_b.data_ptr(),
            None if sinks_h is None else sinks_h.data_ptr(),
            out.data_ptr(),
        )
        return out


class PackedWeight:
    """A weight [n, k] and its bias, packed in the order in which the kernels read them."""

    def __init__(self, kernels: NativeKernels, weight_nk: Tensor, bias_n: Tensor | None) -> None:
        self._kernels = kernels
        self._n, self._k = weight_nk.shape
        weight_nk = weight_nk.contiguous()
        function = kernels.functions["packed_elements", weight_nk.dtype]
        self._packed = _MAPPINGS.allocate(function(self._n, self._k), weight_nk.dtype)
        kernels.functions["pack", weight_nk.dtype](weight_nk.data_ptr(), self._packed.data_ptr(), self._n, self._k)
        self._bias = None if bias_n is None else _by_panel(bias_n.float()).flatten()

    def __call__(self, x_mk: Tensor) -> Tensor:
        """``x @ weight.T + bias``, [M, n], summed in float32 and rounded once; rows are exact."""
        if x_mk.stride(1) != 1:
            x_mk = x_mk.contiguous()
        out = torch.empty(x_mk.shape[0], self._n, dtype=x_mk.dtype)
        self.multiply(x_mk, out)
        return out

    def multiply(self, x_mk: Tensor, out_mn: Tensor) -> None:
        """The same into `out_mn`; of both the rows may lie apart."""
        self._kernels.functions["product", x_mk.dtype](
            x_mk.data_ptr(),
            x_mk.stride(0),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out_mn.data_ptr(),
            out_mn.stride(0),
            x_mk.shape[0],
            self._n,
            self._k,
        )


class PackedHeads:
    """One weight [k, n] a head, each for its own part of the columns, packed."""

    def __init__(self, kernels: NativeKernels, weight_hkn: Tensor) -> None:
        self._heads = [PackedWeight(kernels, weight_kn.T, None) for weight_kn in weight_hkn]
        self._k, self._n = weight_hkn.shape[1:]

    def __call__(self, x_mk: Tensor) -> Tensor:
        """[m, heads * k] gives [m, heads * n]; rows are exact."""
        if x_mk.stride(1) != 1:
            x_mk = x_mk.contiguous()
        out = torch.empty(len(x_mk), len(self._heads) * self._n, dtype=x_mk.dtype)
        parts = zip(self._heads, torch.split(x_mk, self._k, 1), torch.split(out, self._n, 1), strict=True)
        for head, x, columns in parts:
            head.multiply(x, columns)
        return out


class PackedBlocks:
    """A weight in blocks and its bias, packed in the order in which the kernels read them."""

    def __init__(self, kernels: NativeKernels, weight: BlockWeight, bias_n: Tensor | None) -> None:
        self._kernels, self._order, self._dtype = kernels, weight.order_k, weight.dtype
        self._n, self._k = weight.shape
        self._inputs = weight.inputs
        self._code, self._group, self._span, self._zero = weight.code, weight.group, weight.span, weight.zero
        wide = weight.code is Code.E2M1
        fits = weight.factors is None or (weight.factors.dtype == torch.float32) == wide
        assert fits, "kernels have factors of float32 for E2M1, and of float16 for others"
        self._paired, self._added = weight.paired, weight.paired or weight.offsets is not None
        fits = weight.zeros is None or (weight.code in (Code.UINT4, Code.UINT8) and not self._added)
        assert fits, "kernels have zeros by group for UINT4 and UINT8 alone, without offsets"
        fits = not self._added or (weight.code in _WITH_OFFSETS and not weight.zero)
        assert fits, "kernels have offsets for whole numbers of six bits at most, without a zero"
        self._codes = self._packed_codes(weight)
        self._struct: _Blocks | None = None
        parts = {name: part for name in BLOCK_PARTS if (part := getattr(weight, name)) is not None}
        self._parts = {name: _MAPPINGS.place(_by_panel(part)) for name, part in parts.items()}
        self._bias = None if bias_n is None else _by_panel(bias_n.float()).flatten()

    def _packed_codes(self, weight: BlockWeight) -> Tensor:
        """The codes in the order of reading; so many rows of them are unpacked at once as make whole panels."""
        bits, panels, columns, pack = weight.code.bits, -(-self._n // _PANEL), self._k, self._kernels._pack_codes
        if self._inputs != "float":
            columns, pack = -(-columns // INPUT_BLOCK) * INPUT_BLOCK, self._kernels._pack_int8_codes
        packed = _MAPPINGS.allocate(panels * columns * _PANEL * bits // 8, torch.uint8)
        step = max(_PACKED_AT_ONCE // (self._k * _PANEL), 1) * _PANEL
        for first in range(0, self._n, step):
            codes = unpack_codes(weight.codes[first : first + step], weight.code)
            to = packed[first * columns * bits // 8 :]
            pack(codes.data_ptr(), to.data_ptr(), len(codes), self._k, bits)
        return packed

    def _blocks(self) -> int:
        """The address of this weight's struct, which is made once for each place that the codes lie at."""
        codes = self._codes.data_ptr()
        if self._struct is None or self._struct.codes != codes:
            scales, span = self._parts["scales"], self._span or self._k
            self._struct = _Blocks(
                self._n, self._k, self._group, span, -(-self._k // self._group), -(-self._k // span),
                _UINT4_OFFSET if self._code is Code.UINT4 and self._added else self._code.value,
                _PAIRED if self._paired else _SCALE_TYPES[scales.dtype], self._zero, codes,
                *(self._parts[name].data_ptr() if name in self._parts else None for name in BLOCK_PARTS),
            )  # fmt: skip
        return ctypes.addressof(self._struct)

    def __getstate__(self) -> dict[str, Any]:
        """All but the struct, whose addresses are this process's own."""
        return self.__dict__ | {"_struct": None}

    def __call__(self, x_mk: Tensor) -> Tensor:
        """``x @ weight.T + bias``, [M, n], summed in float32 and rounded once; rows are exact. Of float32 the bits are
        those of the product with the unpacked weight, of bfloat16 those of tile_gemm.h."""
        out = torch.empty(x_mk.shape[0], self._n, dtype=x_mk.dtype)
        self.multiply(x_mk, out)
        return out

    def multiply(self, x_mk: Tensor, out_mn: Tensor) -> None:
        """The same into `out_mn`, whose rows may lie apart."""
        if self._order is not None:
            x_mk = x_mk[:, self._order]
        if x_mk.stride(1) != 1:
            x_mk = x_mk.contiguous()
        name, by_row = ("block_product", ()) if self._inputs == "float" else ("int8_product", (self._by_row,))
        self._kernels.functions[name, x_mk.dtype](
            self._blocks(),
            x_mk.data_ptr(),
            x_mk.stride(0),
            None if self._bias is None else self._bias.data_ptr(),
            out_mn.data_ptr(),
            out_mn.stride(0),
            x_mk.shape[0],
            *by_row,
        )

    @property
    def _by_row(self) -> int:
        return int(self._inputs == "int8_by_row")

    def rows(self, rows_m: Tensor) -> Tensor:
        """Rows of the weight, [m] int64, unpacked to [m, k] in the dtype to compute in. Raises `IndexError` for a row
        that it doesn't have."""
        rows_m = rows_m.contiguous()
        out = torch.empty(len(rows_m), self._k, dtype=self._dtype)
        name = "block_rows" if self._inputs == "float" else "int8_rows"
        found = self._kernels.functions[name, out.dtype](self._blocks(), rows_m.data_ptr(), len(rows_m), out.data_ptr())
        if not found:
            raise IndexError(f"rows {rows_m.tolist()} of a weight of {self._n}")
        return out if self._order is None else torch.empty_like(out).index_copy_(1, self._order, out)


class StackedBlocks:
    """Weights in blocks of unlike layouts that are multiplied with the same rows, one below the other, and their
    bias."""

    def __init__(self, kernels: NativeKernels, stack: BlockStack, bias_n: Tensor | None) -> None:
        sizes = [part.shape[0] for part in stack.parts]
        biases = [None] * len(sizes) if bias_n is None else torch.split(bias_n, sizes)
        self._parts = [PackedBlocks(kernels, part, bias) for part, bias in zip(stack.parts, biases, strict=True)]
        self._sizes = sizes

    def __call__(self, x_mk: Tensor) -> Tensor:
        """``x @ weight.T + bias``, [M, n], as `PackedBlocks` computes it."""
        out = torch.empty(x_mk.shape[0], sum(self._sizes), dtype=x_mk.dtype)
        for part, columns in zip(self._parts, torch.split(out, self._sizes, 1), strict=True):
            part.multiply(x_mk, columns)
        return out


def _by_panel(rows: Tensor) -> Tensor:
    """Values of each output, [n] or [n, groups], as kernels read them: [panels, groups, 32], zeros behind the last."""
    groups = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    groups = groups.reshape(len(rows), -1)
    padded = groups.new_zeros(-(-len(rows) // _PANEL) * _PANEL, groups.shape[1])
    padded[: len(rows)] = groups
    packed = padded.view(-1, _PANEL, groups.shape[1]).transpose(1, 2).contiguous()
    return packed.view(rows.dtype)


def huge_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory of so many bytes, on huge pages where the system grants them; returns it, and where they begin."""
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, _PRIVATE)
    at = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    begin, libc = -at % _HUGE_PAGE, ctypes.CDLL(None)
    if hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(at + begin), ctypes.c_size_t(len(mapping) - begin), _MADV_HUGEPAGE)
    return mapping, begin


class _Mappings:
    """Memory of packed weights: neighbours share mappings, which lie on huge pages where the system grants them.

    With few rows a product takes as long as its weight is read, which small pages slow down by half. A huge page that
    is begun is taken whole, so that a mapping a weight would waste a MiB of each. A mapping goes with the last of its
    weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: weakref.ref[mmap.mmap] | None = None
        self._free = 0
        """Where the free part of the last mapping begins."""

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        nbytes = -(-elements * dtype.itemsize // _LINE) * _LINE
        with self._lock:
            mapping = self._last() if self._last is not None else None
            if mapping is None or self._free + nbytes > len(mapping):
                mapping, self._free = huge_pages(max(_MAPPING, nbytes))
                self._last = weakref.ref(mapping)
            begin, self._free = self._free, self._free + nbytes
        return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=begin)

    def place(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the memory of weights."""
        return self.allocate(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)


_MAPPINGS = _Mappings()
