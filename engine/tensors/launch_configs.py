"""Warps and stages of Triton kernels, as they were measured to be fastest: by kernel, shape and GPU.

`launch_configs.json` is written by `python -m bench.kernels --tune` on a GPU, and read by the launchers; what isn't in
it runs as the launcher says. Only options under which a kernel adds up in the same order get into it
(`bench.kernels.tune_launches`), so results have the same bits with any table, and without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("launch_configs.json")
SIZES = ("ROWS", "BLOCK_D", "BLOCK_L", "BLOCK_H", "BLOCK_N", "BLOCK_K", "QUERIES")
"""The constants of a kernel that are the shape of its tile: launches with equal ones are of one class."""


def launch_options(
    kernel: Any, dtype: torch.dtype, constants: Mapping[str, Any], warps: int, stages: int
) -> dict[str, int]:  # fmt: skip
    """The options of a launch of `kernel` over data of `dtype`: those of the table, else `warps` and `stages`."""
    name: str = kernel.fn.__name__
    sizes = tuple([constants.get(size, 0) for size in SIZES])
    found = tuned(current_gpu()).get(shape_class(name, dtype, sizes), (warps, stages))
    return {"num_warps": found[0], "num_stages": found[1]}


@cache
def shape_class(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    """The key of the table, as ``extend_kernel bfloat16 ROWS=64 BLOCK_D=128 BLOCK_N=64``."""
    named = [f"{name}={size}" for name, size in zip(SIZES, sizes, strict=True) if size]
    return " ".join([kernel, str(dtype).removeprefix("torch."), *named])


@cache
def current_gpu() -> str:
    """The name of the current GPU; empty where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@cache
def tuned(gpu: str) -> dict[str, tuple[int, int]]:
    """Warps and stages by shape class, for one GPU. Raises `ValueError` for a table that isn't one."""
    return {key: (warps, stages) for key, (warps, stages) in read_table().get(gpu, {}).items()}


def read_table() -> dict[str, dict[str, list[int]]]:
    """GPU -> shape class -> warps and stages."""
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    for gpu, classes in table.items():
        for key, options in classes.items():
            if len(options) != 2 or any(type(option) is not int or option < 1 for option in options):
                raise ValueError(
                    f"{TABLE.name}: {gpu}, {key}: two numbers of 1 or more, warps and stages; got {options}"
                )
    return table
