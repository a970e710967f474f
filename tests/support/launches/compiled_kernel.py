"""Kernels compiled for a GPU that need not be there, and what their code says of itself."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.launches.chip_limits import CHIPS, blocks_at_once
from tests.support.launches.recorded_launches import RecordedLaunch

SPILL_LIMIT = 32
"""Bytes that a kernel may move from registers to local memory."""
_PRODUCT = re.compile(r"tt\.dot|ttng\.warp_group_dot |ttng\.tc_gen5_mma")
_TILE_LOAD = re.compile(r"= tt\.load .*tensor<\d+x\d+x")
_REDUCTION = re.compile(
    r'"tt\.(?:reduce|scan)"\([^)]*\) <\{axis = (\d).*?\}> \(\{(.*?)\}\) : \((.*?)\) ->', re.DOTALL
)  # fmt: skip
_ASYNC = re.compile(r"ttg\.async_copy_global_to_local|ttng\.async_tma_copy")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel's code for one chip."""

    capability: int
    registers: int
    """Of a thread."""
    spill_stores: int
    """Bytes a thread moves to local memory because it has no register left; `spill_loads`: and back."""
    spill_loads: int
    shared_bytes: int
    warps: int
    stages: int
    blocks: int
    """That a multiprocessor runs at once."""
    product_loops: int
    """Loops that multiply tiles."""
    async_loops: int
    """Of these, those that copy what they multiply asynchronously, and load no tile in any other way."""
    instructions: tuple[str, ...]
    """Which kinds of instructions there are, of `_INSTRUCTIONS`."""
    orders: tuple[str, ...]
    """All that the order of additions follows from: each sum over an axis of a tile, and each product, with the layout
    that says which thread and which instruction has which elements. Equal orders are equal bits."""

    @property
    def occupancy(self) -> float:
        """Warps that a multiprocessor runs at once, of those that it could."""
        return self.blocks * self.warps / CHIPS[self.capability].warps


_INSTRUCTIONS = ("cp.async", "wgmma", "mma.sync", "tcgen05.mma", "fma.rn.f32", "tf32")
RACING = "atomics in floating point"
"""Additions whose order nobody fixes. Those of integers come out the same in any order."""
_RACING = re.compile(r"\b(?:atom|red)\.\S*\.(?:b?f16|f32|f64)")


def compiled(launch: RecordedLaunch, capability: int) -> CompiledKernel:
    """Compile a launch's kernel as its launcher has it. Raises triton's errors where it doesn't compile."""
    names = list(launch.signature)
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.getvalue())
    used = re.search(r"Used (\d+) registers", said.getvalue())
    if spills is None or used is None:
        raise RuntimeError(f"ptxas says nothing of {launch.name}: {said.getvalue()!r}")
    loops = product_loops(code.asm["ttgir"])
    shared, warps = int(code.metadata.shared), int(code.metadata.num_warps)
    return CompiledKernel(
        capability=capability,
        registers=int(used[1]),
        spill_stores=int(spills[1]),
        spill_loads=int(spills[2]),
        shared_bytes=shared,
        warps=warps,
        stages=int(code.metadata.num_stages),
        blocks=blocks_at_once(CHIPS[capability], int(used[1]), shared, warps),
        product_loops=len(loops),
        async_loops=sum(loops),
        instructions=_kinds(code.asm["ptx"]),
        orders=addition_orders(code.asm["ttgir"]),
    )


def _kinds(ptx: Any) -> tuple[str, ...]:
    racing = (RACING,) if _RACING.search(ptx) else ()
    return (*(word for word in _INSTRUCTIONS if word in ptx), *racing)


def product_loops(ttgir: str) -> list[bool]:
    """Of each loop that multiplies tiles itself, in the compiler's last portable form of a kernel: whether it copies
    asynchronously, and loads no tile in any other way."""
    lines = ttgir.splitlines()
    return [
        any(map(_ASYNC.search, body)) and not any(map(_TILE_LOAD.search, body))
        for body in _own_lines(lines)
        if any(map(_PRODUCT.search, body))
    ]


def addition_orders(ttgir: str) -> tuple[str, ...]:
    """See `CompiledKernel.orders`; of the compiler's last portable form of a kernel, which is fixed up to the choice
    of registers."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg?n?g?\.\w+<\{.*\}>)$", ttgir, re.MULTILINE))

    def spelled(kind: str) -> str:
        return re.sub(r"#\w+(?![\w.])", lambda name: layouts.get(name[0], name[0]), kind)

    sums = [
        f"sum over axis {axis} of {spelled(kind)}"
        for axis, body, kind in _REDUCTION.findall(ttgir)
        if "arith.addf" in body
    ]
    products = [
        f"product to {spelled(line.rsplit('->', 1)[1].split(' loc(')[0].strip())}"
        if "->" in line
        else f"product of {', '.join(re.findall(r'memdesc<([0-9x]+x[a-z][0-9a-zA-Z]+)', line))}"
        for line in ttgir.splitlines()
        if _PRODUCT.search(line)
    ]
    return tuple(sorted({*sums, *products}))


def _own_lines(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each loop that are in no loop inside of it. Loops end on the indentation that they begin on."""
    done, open_loops = list[list[str]](), list[tuple[int, list[str]]]()
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if open_loops and indent == open_loops[-1][0] and line.lstrip().startswith("}"):
            done.append(open_loops.pop()[1])
        elif "scf.for " in line or "scf.while " in line:
            open_loops.append((indent, []))
        elif open_loops:
            open_loops[-1][1].append(line)
    return done
