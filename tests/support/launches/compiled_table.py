"""The table of compiled kernels: registers, spills, shared memory and occupancy, without a GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from tests.support.launches.chip_limits import CHIPS
from tests.support.launches.compiled_kernel import RACING, SPILL_LIMIT, CompiledKernel, compiled
from tests.support.launches.production_launches import Scene, scenes
from tests.support.launches.recorded_launches import RecordedLaunch, recording
from twinpool.engine.attention.triton_backend.attend_call import SCRATCH_BYTES

HEADER = (
    "| kernel | launched by | registers | spilled B | shared KiB | warps, stages | blocks (occupancy) | async loops "
    "| products |\n|---|---|---:|---:|---:|---:|---:|---:|---|"
)


@dataclass(frozen=True)
class TableRow:
    """One kernel as some scene launches it, compiled for one chip."""

    kernel: str
    scene: str
    constants: dict[str, Any]
    scratch_bytes: int
    """The most that a launch of this compilation had."""
    code: CompiledKernel
    over_pages: bool
    """Whether it reads pages through block tables."""

    def faults(self) -> list[str]:
        """What no kernel may be like."""
        code, found = self.code, []
        if code.blocks == 0:
            found.append("does not fit into a multiprocessor")
        if max(code.spill_stores, code.spill_loads) > SPILL_LIMIT:
            found.append(f"spills {code.spill_stores} bytes and reads {code.spill_loads}, more than {SPILL_LIMIT}")
        if self.over_pages and code.async_loops < code.product_loops:
            found.append("has a loop over pages that does not copy asynchronously")
        if "tf32" in code.instructions:
            found.append("multiplies float32 as TF32")
        if RACING in code.instructions:
            found.append("adds in racing order")
        if self.scratch_bytes > SCRATCH_BYTES:
            found.append(f"has {self.scratch_bytes} bytes of scratch, more than {SCRATCH_BYTES}")
        return found

    def line(self) -> str:
        code = self.code
        kinds: list[str] = [word for word in ("wgmma", "tcgen05.mma", "mma.sync") if word in code.instructions]
        product = (kinds or ["fma"])[0] if code.product_loops else ""
        loops = f"{code.async_loops} of {code.product_loops}" if code.product_loops else ""
        spilled = f"{code.spill_stores}" if code.spill_stores == code.spill_loads else (
            f"{code.spill_stores}, {code.spill_loads}"
        )  # fmt: skip
        return (
            f"| {self.kernel.removesuffix('_kernel')} | {self.scene} | {code.registers} | {spilled} "
            f"| {code.shared_bytes / 1024:.0f} | {code.warps}, {code.stages} | {code.blocks} ({code.occupancy:.0%}) "
            f"| {loops} | {product} |"
        )


@dataclass
class _Distinct:
    """Launches that are one compilation."""

    scene: str
    launch: RecordedLaunch
    scratch_bytes: int = 0


def distinct(todo: Iterable[Scene]) -> list[tuple[str, RecordedLaunch, int]]:
    """What scenes launch, each compilation once: the first scene of it, a launch, and the most scratch of any."""
    found: dict[Any, _Distinct] = {}
    with recording() as launches:
        for scene in todo:
            scene.launch()
            for launch in launches:
                # A constant that is an integer in one launch and specialised in another is another compilation.
                key = (launch.name, *map(tuple, (launch.signature.items(), launch.constants.items(), launch.aligned)),
                       tuple(launch.options.items()))  # fmt: skip
                known = found.setdefault(key, _Distinct(scene.name, launch))
                known.scratch_bytes = max(known.scratch_bytes, launch.scratch_bytes)
            launches.clear()
    return [(known.scene, known.launch, known.scratch_bytes) for known in found.values()]


def rows(capability: int, only: str = "") -> Iterator[TableRow]:
    """Compile everything whose kernel or scene has `only` in its name, for one chip."""
    for scene, launch, scratch_bytes in distinct(scenes(capability)):
        if only in scene or only in launch.name:
            code = compiled(launch, capability)
            over_pages = "tables_ptr" in launch.signature and code.product_loops > 0
            constants = {name: value for name, value in launch.constants.items() if name.isupper()}
            yield TableRow(launch.name, scene, constants, scratch_bytes, code, over_pages)


def main(capabilities: Sequence[int], only: str, json_file: Path | None) -> int:
    """Print the table of each chip. Returns 1 where a kernel is as none may be."""
    wrong, written = 0, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="twinpool-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for capability in capabilities:
            print(f"compute capability {capability / 10}, triton {triton.__version__}\n\n{HEADER}")
            for row in rows(capability, only):
                print(row.line(), flush=True)
                faults = row.faults()
                for fault in faults:
                    print(f"FAULT: {row.kernel} {fault}", file=sys.stderr)
                wrong += bool(faults)
                written.append({**asdict(row), "occupancy": row.code.occupancy, "faults": faults})
            print()
    if json_file is not None:
        about = {"triton": triton.__version__, "chips": {key: asdict(CHIPS[key]) for key in capabilities}}
        json_file.write_text(json.dumps({**about, "rows": written}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(written) - wrong} compilations are as they should be, {wrong} are not")
    return 1 if wrong else 0
