"""What the compiled code of the Triton kernels says of itself; no GPU is needed for that.

Every kernel is launched by its own launcher on tensors without contents, and what a GPU would have been given is
compiled (`bench.kernels`): so the rows are of what runs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.forked_scripts import ROOT, Said

PACKAGES = ("cache", "engine", "transfer", "worker", "prefill", "decode", "colocate")

pytestmark = [pytest.mark.slow, pytest.mark.runs("compiled_kernels.py")]


def rows_of(said: Said, kernel: str, scene: str = "") -> list[dict[str, Any]]:
    found = [row for row in said["rows"] if row["kernel"] == kernel and scene in row["scene"]]
    assert found, f"no row of {kernel} {scene}"
    return found


def kernels_of_the_product() -> set[str]:
    """The functions that Triton compiles and launches: those that write something."""
    found = set()
    for package in PACKAGES:
        for file in Path(ROOT, package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "triton.jit" in text:
                nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
                found |= {
                    node.name for node in nodes if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
                }
    return {name for name in found if not name.startswith("_") and name.endswith("_kernel")}


def test_every_kernel_of_the_product_is_in_the_table(said: Said) -> None:
    assert {row["kernel"] for row in said["rows"]} == kernels_of_the_product()


def test_no_kernel_spills_and_loops_over_pages_copy_asynchronously_and_scratch_is_bounded(said: Said) -> None:
    faults = {f"{row['kernel']} by {row['scene']}": row["faults"] for row in said["rows"] if row["faults"]}
    assert faults == {}
    over_pages = {row["kernel"] for row in said["rows"] if row["over_pages"]}
    assert over_pages == {"extend_kernel", "decode_split_kernel", "latent_split_kernel", "index_score_kernel"}


@pytest.mark.soak
@pytest.mark.runs("compiled_kernels_80.py")
def test_nor_on_gpus_of_the_generation_before(said: Said) -> None:
    assert [(row["kernel"], row["scene"], row["faults"]) for row in said["rows"] if row["faults"]] == []


@pytest.mark.soak
@pytest.mark.runs("compiled_kernels_100.py")
def test_nor_on_gpus_of_the_generation_after(said: Said) -> None:
    assert [(row["kernel"], row["scene"], row["faults"]) for row in said["rows"] if row["faults"]] == []


def test_products_in_half_precision_are_the_tensor_cores(said: Said) -> None:
    for kernel in ("extend_kernel", "decode_split_kernel"):
        for row in rows_of(said, kernel, "Llama 3: 32/8 of 128: "):
            assert "wgmma" in row["code"]["instructions"]
    for row in rows_of(said, "latent_split_kernel", "DeepSeek-V3.2: "):
        assert "wgmma" in row["code"]["instructions"]
    for row in rows_of(said, "grouped_product_kernel", "bfloat16"):
        assert "wgmma" in row["code"]["instructions"]


def test_extend_and_decode_add_up_in_one_order_as_compiled(said: Said) -> None:
    """A decoded row is the extended row's bits: no claim of the interpreter's, which has no threads and no layouts."""
    by_model: dict[str, dict[str, set[str]]] = {}
    for kernel in ("extend_kernel", "decode_split_kernel"):
        for row in rows_of(said, kernel):
            model = row["scene"].rsplit(": ", 1)[0]
            by_model.setdefault(model, {}).setdefault(kernel, set()).add(repr(row["code"]["orders"]))
    both = {model: kernels for model, kernels in by_model.items() if len(kernels) == 2}
    assert len(both) >= 8
    for model, kernels in both.items():
        assert len(set.union(*kernels.values())) == 1, f"{model}: {kernels}"


def test_a_kernel_adds_up_in_one_order_however_it_is_specialised(said: Said) -> None:
    """By batch, by context and by alignment Triton compiles one kernel several times; a row's bits may not tell."""
    for kernel in ("latent_split_kernel", "merge_segments_kernel", "merge_splits_kernel", "scan_kernel"):
        orders: dict[str, set[str]] = {}
        for row in rows_of(said, kernel):
            sizes = repr(sorted((k, v) for k, v in row["constants"].items() if k not in ("PARTS", "MUTED")))
            orders.setdefault(f"{sizes} {'float32' in row['scene']}", set()).add(repr(row["code"]["orders"]))
        assert all(len(found) == 1 for found in orders.values()), kernel


@pytest.mark.parametrize(("kernel", "scene"), [("product_kernel", "bfloat16"), *(
    ("block_product_kernel", kind) for kind in ("AWQ", "float8", "MXFP4", "Q4_K")
)])  # fmt: skip
def test_a_product_has_one_matrix_instruction_whatever_its_rows(said: Said, kernel: str, scene: str) -> None:
    """Else a row's bits would follow from the size of its batch: tiles of more rows have more warps, and no more."""
    rows = rows_of(said, kernel, scene)
    assert {row["constants"]["ROWS"] for row in rows} == {64, 128}
    assert {row["constants"]["WHOLE"] for row in rows} == {False, True}
    instructions = [
        re.sub(r"warpsPerCTA = \[\d+, \d+\]|\d+x\d+xf32", "", order)
        for row in rows
        for order in row["code"]["orders"]
        if order.startswith("product to")
    ]
    assert len(instructions) >= 2
    assert len(set(instructions)) == 1, set(instructions)
    assert "instrShape" in instructions[0]
