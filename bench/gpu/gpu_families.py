"""Every family through both workers on a GPU, against transformers: correctness, before anything is measured.

    python -m bench.gpu.gpu_families [--families llama qwen3_next] [--json FILE]

The scenes are those of the tests, with workers whose pools and steps are on the GPU: prefill, hand-over (within a
process and through bounce buffers), pools too small for the state so that it goes over all tiers, retraction and
resuming, migration, and damage to each buffer that has to be found. Each prints what it came to; one that fails is
told and the next one runs. A scene that the time doesn't suffice for, or that needs pyzmq where that isn't installed,
is told as not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers

import bench.gpu
from cache.device.async_cpu_device import AsyncCpuDevice
from cache.device.device_backends import CudaDevice
from tests.default_device import MAKERS
from tests.families import FAMILIES
from tests.family_scenes import Family, expect_answers, expect_damage_is_caught, expect_tiers, make_family
from tests.migration_scenes import expect_migrations_change_nothing
from tests.retract_scenes import expect_same_answers

LENGTHS = (1, 2, 16, 17, 65, 130, 200)
_TRACE_LINES = 12
_BETWEEN_SOCKETS = ("answers through bounce buffers",)
"""Scenes whose workers need pyzmq, though both are in this process."""


def _retract(family: Family) -> None:
    expect_same_answers(family, 20, at_once=20, longest=32, answer=16)


SCENES: dict[str, Callable[[Family], object]] = {
    "answers": lambda family: expect_answers(family, "local", LENGTHS, 10),
    "answers through bounce buffers": lambda family: expect_answers(family, "staged", LENGTHS, 10),
    "tiers": lambda family: expect_tiers(family, talks=5, turns=2),
    "retraction": _retract,
    "migration": lambda family: expect_migrations_change_nothing(family.folder),
    "damage": expect_damage_is_caught,
}


@dataclass(frozen=True)
class SceneResult:
    """What one scene of one family came to."""

    family: str
    scene: str
    ended: str
    """``passed``, ``failed``, or ``not run``."""
    seconds: float
    why: str = ""


def run_scene(family: Family, scene: str) -> SceneResult:
    """One scene; its error is kept."""
    began = time.monotonic()
    try:
        SCENES[scene](family)
    except Exception:
        why = "\n".join(traceback.format_exc().splitlines()[-_TRACE_LINES:])
        return SceneResult(family.name, scene, "failed", time.monotonic() - began, why)
    return SceneResult(family.name, scene, "passed", time.monotonic() - began)


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="default: all")
    flags.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES), help="default: all")
    flags.add_argument("--seconds", type=float, default=240.0, help="after which no scene is begun")
    flags.add_argument("--json", type=Path, help="write what came of each scene to this file, after every one")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, one family")
    args = flags.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    MAKERS.append(AsyncCpuDevice if args.rehearse else CudaDevice)
    names = args.families[:1] if args.rehearse else args.families
    ends_at, results = time.monotonic() + args.seconds, list[SceneResult]()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        families = [make_family(name, Path(folder)) for name in names]
        # Scene by scene, so that time that runs out costs the last scenes and no family.
        for scene in args.scenes:
            for family in families:
                over = time.monotonic() > ends_at or (bench.gpu.STANDS_IN and scene in _BETWEEN_SOCKETS)
                result = SceneResult(family.name, scene, "not run", 0.0) if over else run_scene(family, scene)
                results.append(result)
                print(f"{result.family:14} {result.scene:32} {result.ended}, {result.seconds:.1f} s", flush=True)
                if result.why:
                    print(result.why, flush=True)
                if args.json is not None:
                    written = json.dumps({"scenes": [asdict(each) for each in results]}, indent=1)
                    args.json.write_text(written + "\n", encoding="utf-8")
    wrong = [f"{r.family}: {r.scene}" for r in results if r.ended == "failed"]
    left = sum(r.ended == "not run" for r in results)
    print(f"{len(results) - len(wrong) - left} scenes passed, {len(wrong)} failed, {left} not run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
