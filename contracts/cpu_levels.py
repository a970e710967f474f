"""The instruction sets of this machine's processor, and the levels that a cluster of unlike machines can be pinned to.

This module imports no library that computes: such libraries read the variables named here when they are first used, so
a process that wants a level sets the variables before (`pin`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from twinpool.contracts.errors import ConfigError

_NEEDS = {
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
"""Flags of /proc/cpuinfo that a level has beyond the one before it, as the x86-64 psABI defines the levels."""
LEVELS = tuple(_NEEDS)
"""The levels, from the least to the most instructions."""
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "x86-64-v4": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
}
"""Level -> environment variables that keep torch, oneDNN, MKL and OpenBLAS to its instructions."""
_ONEDNN = (
    ("avx512_core_amx_fp16", ("avx512f", "amx_tile", "amx_fp16")),
    ("avx512_core_amx", ("avx512f", "amx_tile", "amx_bf16")),
    ("avx512_core_fp16", ("avx512f", "avx512_fp16", "avx512_bf16")),
    ("avx512_core_bf16", ("avx512f", "avx512_bf16")),
    ("avx512_core_vnni", ("avx512f", "avx512_vnni")),
    ("avx512_core", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("avx2_vnni", ("avx2", "avx_vnni")),
    ("avx2", ("avx2",)),
    ("avx", ("avx",)),
    ("sse41", ("sse4_1",)),
)
"""oneDNN's names of instruction sets, from the most to the least, and the flags that each needs."""


@cache
def flags() -> frozenset[str]:
    """The processor's features as Linux names them; empty where /proc/cpuinfo can't be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def levels(has: frozenset[str] | None = None) -> tuple[str, ...]:
    """The levels that this machine (or one with the flags `has`) can run, from the least to the most."""
    has = flags() if has is None else has
    found: list[str] = []
    for level, needs in _NEEDS.items():
        if not has.issuperset(needs):
            break
        found.append(level)
    return tuple(found)


def described(pinned: str = "", has: frozenset[str] | None = None) -> str:
    """The instruction set of code compiled for this machine, in words: a level, and the extensions that change bits.

    `pinned`: the level that the process is pinned to, which then is the answer.
    """
    if pinned:
        return pinned
    has = flags() if has is None else has
    level = (levels(has) or (platform.machine(),))[-1]
    return "+".join([level, *(extra for extra in ("avx512_bf16", "amx_bf16") if extra in has)])


def onednn_isa(environment: Mapping[str, str] | None = None, has: frozenset[str] | None = None) -> str:
    """The instruction set that oneDNN uses: the processor's best, unless ``ONEDNN_MAX_CPU_ISA`` is below it."""
    has = flags() if has is None else has
    limit = (os.environ if environment is None else environment).get("ONEDNN_MAX_CPU_ISA", "").lower()
    names = [name for name, _ in _ONEDNN]
    first = names.index(limit) if limit in names else 0
    return next((name for name, needs in _ONEDNN[first:] if has.issuperset(needs)), "reference")


def pin(level: str) -> dict[str, str]:
    """Pin this process's libraries to `level` (``auto``: leave them alone); returns the variables that were set.

    To be called before any library computes, and `check_pinned` once torch is imported. Raises `ConfigError` where the
    machine can't run the level.
    """
    if level == "auto":
        return {}
    can = levels()
    if level not in can:
        raise ConfigError(
            f"engine.numerics_class={level}: this machine's processor can't run it; it runs "
            f"{', '.join(can) or 'none of the levels'}: set a level that every machine of the cluster runs, or auto"
        )
    wanted = dict(VARIABLES[level])
    os.environ.update(wanted)
    return wanted


def check_pinned(level: str, capability: str) -> None:
    """Check that torch keeps to `level`; raises `ConfigError` where it doesn't, as `pin` was called too late.

    `capability`: torch's own name for the instructions that it uses.
    """
    if level != "auto" and capability.lower() != VARIABLES[level]["ATEN_CPU_CAPABILITY"]:
        raise ConfigError(
            f"engine.numerics_class={level}: torch computes with {capability} in this process, because it had computed "
            "before the level was set; start the worker in a process of its own"
        )
