"""Every family through both workers on a GPU, against transformers: correctness, before anything is measured.

    python -m tests.support.gpu_families [--families llama qwen3_next] [--json FILE]

The scenes are those of the tests, with workers whose pools and steps are on the GPU: prefill, hand-over (within a
process and through bounce buffers), pools too small for the state so that it goes over all tiers, retraction and
resuming, migration, and damage to each buffer that has to be found. Each prints what it came to; one that fails is
told and the next one runs. A scene that needs pyzmq where that isn't installed is told as not run. Families are divided
among processes on the same GPU, since most of the time goes into compiling kernels, on one core each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version

import bench.gpu
from bench.common.bench_report import write_figures
from tests.support.default_device import MAKERS
from tests.support.family_scenes import Family, expect_answers, expect_damage_is_caught, expect_tiers, make_family
from tests.support.migration_scenes import expect_migrations_change_nothing
from tests.support.model_families import FAMILIES
from tests.support.retract_scenes import expect_same_answers
from twinpool.cache.device.cpu_device import AsyncCpuDevice
from twinpool.cache.device.cuda_device import CudaDevice

LENGTHS = (1, 2, 16, 17, 65, 130, 200)
_TRACE_LINES = 12
_BETWEEN_SOCKETS = ("answers through bounce buffers",)
"""Scenes whose workers need pyzmq, though both are in this process."""


def _retract(family: Family) -> None:
    expect_same_answers(family, 20, at_once=20, longest=32, answer=16)


_NEEDS = {"falcon_h1": "5.23"}
"""The transformers that a family's oracle needs: the own forward pass of earlier ones fails on 200 tokens."""
_ORACLE_READS = ("answers", "answers through bounce buffers", "tiers", "damage")

SCENES: dict[str, Callable[[Family], object]] = {
    "answers": lambda family: expect_answers(family, "local", LENGTHS, 10),
    "answers through bounce buffers": lambda family: expect_answers(family, "staged", LENGTHS, 10),
    "tiers": lambda family: expect_tiers(family, talks=5, turns=2),
    "retraction": _retract,
    "migration": lambda family: expect_migrations_change_nothing(family.folder),
    "damage": expect_damage_is_caught,
}


_LOOK_S = 2.0
"""Seconds between two looks at what the processes have so far."""


@dataclass(frozen=True)
class SceneResult:
    """What one scene of one family came to."""

    family: str
    scene: str
    ended: str
    """``passed``, ``failed``, or ``not run`` as it can't be run here."""
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
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--families", nargs="+", choices=list(FAMILIES), help="default: all, in a rehearsal one")
    flags.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES), help="default: all")
    flags.add_argument("--processes", type=int, default=6, help="side by side (default: %(default)s)")
    flags.add_argument("--json", type=Path, help="write what came of each scene to this file, after every one")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU")
    args = flags.parse_args(argv)
    if args.processes < 1:
        flags.error("--processes must be more than 0")
    args.families = args.families or list(FAMILIES)[: 1 if args.rehearse else None]
    if args.processes > 1 and len(args.families) > 1:
        return _divided(args)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    MAKERS.append(AsyncCpuDevice if args.rehearse else CudaDevice)
    results = list[SceneResult]()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        families = [make_family(name, Path(folder)) for name in args.families]
        # Scene by scene, so that time that runs out costs the last scenes and no family.
        for scene in args.scenes:
            for family in families:
                needs = _NEEDS.get(family.name, "0")
                if bench.gpu.STANDS_IN and scene in _BETWEEN_SOCKETS:
                    result = SceneResult(family.name, scene, "not run", 0.0)
                elif scene in _ORACLE_READS and Version(transformers.__version__) < Version(needs):
                    result = SceneResult(family.name, scene, "not run", 0.0, f"it needs transformers {needs}")
                else:
                    result = run_scene(family, scene)
                results.append(result)
                print(f"{result.family:14} {result.scene:32} {result.ended}, {result.seconds:.1f} s", flush=True)
                if result.why:
                    print(result.why, flush=True)
                write_figures(args.json, {"scenes": [asdict(one) for one in results]})
    return _summary([result.ended for result in results])


def _summary(ended: Sequence[str]) -> int:
    """Says how many scenes came to what; returns the exit code."""
    failed, left = ended.count("failed"), ended.count("not run")
    print(f"{len(ended) - failed - left} scenes passed, {failed} failed, {left} not run", flush=True)
    return 1 if failed else 0


def _divided(args: argparse.Namespace) -> int:
    """The families in turn to processes of this program, and what they came to together."""
    groups = [group for n in range(args.processes) if (group := args.families[n :: args.processes])]
    env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(groups)))}
    scenes: list[dict[str, Any]] = []
    codes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder, ExitStack() as stack:
        parts = [Path(folder) / f"{number}.json" for number in range(len(groups))]
        children = []
        for group, part in zip(groups, parts, strict=True):
            chosen = ["--families", *group, "--scenes", *args.scenes]
            chosen += ["--rehearse"] if args.rehearse else []
            write_figures(part, {"scenes": []})
            command = [
                sys.executable,
                "-m",
                "tests.support.gpu_families",
                *chosen,
                "--processes",
                "1",
                "--json",
                str(part),
            ]
            children.append(subprocess.Popen(command, env=env))
            stack.callback(_ended, children[-1])
        while len(codes) < len(children):
            with suppress(subprocess.TimeoutExpired):
                codes.append(children[len(codes)].wait(_LOOK_S))
            scenes = [one for part in parts for one in json.loads(part.read_text(encoding="utf-8"))["scenes"]]
            write_figures(args.json, {"scenes": scenes})
    expected = len(args.families) * len(args.scenes)
    if len(scenes) < expected:
        print(f"{expected - len(scenes)} scenes came to nothing: exit codes {codes}")
    return _summary([scene["ended"] for scene in scenes]) or int(len(scenes) < expected)


def _ended(child: subprocess.Popen[bytes]) -> None:
    """End a process that is still there."""
    if child.poll() is None:
        child.kill()
    child.wait()


if __name__ == "__main__":
    sys.exit(main())
