"""Everything that runs on a GPU, checked and measured by one command in some minutes.

    python -m bench.gpu --out gpu.json              # all sections
    python -m bench.gpu --only copies engine        # some of them
    python -m bench.gpu --out gpu.json --resume     # what gpu.json doesn't have yet, or what failed there, or in part
    python -m bench.gpu --rehearse                  # on a CPU, in small: does this script work?

Sections: `kernels` (the Triton kernels: right, invariant, and how fast beside torch's own), `families` (every family
through both workers with their state on the GPU, against transformers: hand-over, tiers, retraction, migration,
damage), `copies` (what goes between the device and pinned host memory beside one plain copy of as many bytes, alone and
beside products, and whether it comes back as it went), `handover` (planes `staged`, `cuda_ipc` and `nixl` between two
processes on one card, every byte compared), `engine` (prefill and decode of models with random weights beside
transformers on the same GPU, and whether the tokens agree), `serving` (whole workers: exposed time of the hand-over,
goodput of two pools and of a colocated worker beside transformers' continuous batching, what verification costs). Each
is a process of its own with a deadline, its part of what is left (`WEIGHTS`): one that fails or hangs costs the others
nothing. What each printed and its figures go into one file, and its tables for docs/benchmarks.md, with what the GPU
would allow beside each figure, into one beside it (gpu.md). Exit code 1 when a section failed.

What a section has so far is in the folder gpu.parts, however it ends: `--resume` goes on from there, also where this
program was killed in the middle. A section for all of which the time didn't suffice is told as such, and gone on with.

Needs torch with CUDA, triton, transformers, msgpack, grpcio, xxhash, psutil and rich, and neither ray nor a network.
Without pyzmq workers tell each other of rooms by queues (`bench.gpu.process_sockets`), and what is between processes is
told as not run: section `handover`, and the scene through bounce buffers. A rehearsal says nothing about a GPU; its
file says that it was one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import machine
from bench.common.section_figures import NOT_COMPLETE, write_figures
from bench.gpu.gpu_tables import tables

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "kernels": "bench.kernels",
    "families": "bench.gpu.gpu_families",
    "copies": "bench.gpu.gpu_copies",
    "handover": "bench.gpu.gpu_handover",
    "engine": "bench.gpu.gpu_engine",
    "serving": "bench.gpu.gpu_serving",
}
WEIGHTS = {"kernels": 110, "families": 110, "copies": 25, "handover": 25, "engine": 110, "serving": 160}
"""Seconds of nine minutes; what a section leaves is the others'."""
NOT_RUN = 77
"""Exit code of a section that can't be run on this machine."""
_BEGUN_SHARE = 0.85
"""Part of its time after which a section that looks at it begins nothing more."""
_LOOK_AT_TIME = ("kernels", "families", "engine", "serving")
_ENDED = {NOT_RUN: "not run", NOT_COMPLETE: "not complete: its time was over"}
_TAIL_LINES = 40
"""Of what a section printed, what goes to the screen."""


@dataclass(frozen=True)
class SectionResult:
    """What one section came to."""

    section: str
    ok: bool
    seconds: float
    ended: str
    """Exit code, that its time was over, or that it can't be run here."""
    output: str
    figures: dict[str, Any] | None
    """What it wrote; None: nothing."""
    complete: bool = True
    """Whether its time sufficed for all of it."""


def run_section(
    section: str, extra: Sequence[str], deadline_s: float, env: dict[str, str], parts: Path | None = None
) -> SectionResult:
    """One section in a process of its own, which is gone at the end with all that it began. `parts`: the folder that
    its figures are left in."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        out = (parts or Path(folder)) / f"{section}.json"
        command = [sys.executable, "-m", MODULES[section], "--json", str(out), *extra]
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(timeout=deadline_s)
                ended = _ENDED.get(child.returncode, f"exit code {child.returncode}")
            except subprocess.TimeoutExpired:
                _kill_all(child)
                output, _ = child.communicate()
                ended = f"not done after {deadline_s:.0f} s"
            finally:
                _kill_all(child)
        ok, complete = child.returncode in (0, NOT_COMPLETE), child.returncode != NOT_COMPLETE
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return SectionResult(section, ok, time.monotonic() - began, ended, output, figures, complete)


def _kill_all(child: subprocess.Popen[str]) -> None:
    """A section's process, and those that it began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def passed_before(out: Path, rehearsal: bool) -> list[SectionResult]:
    """The sections that passed, and were complete, when `out` was written.

    Raises `SystemExit` where it is of a rehearsal and this is none, or the other way round.
    """
    if not out.exists():
        return []
    written = json.loads(out.read_text(encoding="utf-8"))
    if written["rehearsal"] != rehearsal:
        raise SystemExit(f"bench.gpu: {out} is {'' if written['rehearsal'] else 'not '}of a rehearsal")
    return [
        SectionResult(**section)
        for section in written["sections"].values()
        if section["ok"] and section.get("complete", True)
    ]


def gpu() -> dict[str, object] | None:
    """The GPU that torch sees first, and its driver's versions; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def parts_of(out: Path, rehearsal: bool) -> Path:
    """The folder with the figures of sections under way, beside `out`."""
    return out.with_suffix(".rehearsed-parts" if rehearsal else ".parts")


def flags_of(section: str, seconds: float, rehearse: bool, resume: bool = False) -> list[str]:
    """The flags of a section's own program. The kernels are rehearsed by Triton's interpreter alone."""
    out = ["--rehearse"] if rehearse and section != "kernels" else []
    out += ["--resume"] if resume and section in _LOOK_AT_TIME else []
    return [*out, "--seconds", f"{_BEGUN_SHARE * seconds:.0f}"] if section in _LOOK_AT_TIME else out


def run_in_turn(run: Callable[[str, float], None], sections: Sequence[str], seconds: float, at_once: int) -> None:
    """Run the sections, `at_once` of them side by side, each with its part of the time that is left."""
    ends_at, todo, lock = time.monotonic() + seconds, list(sections), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                share = at_once * WEIGHTS[todo[0]] / sum(WEIGHTS[section] for section in todo)
                section = todo.pop(0)
            run(section, max(1.0, min(1.0, share) * (ends_at - time.monotonic())))

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work) for _ in range(at_once)]:
            done.result()


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), help="default: all")
    flags.add_argument("--minutes", type=float, default=9.0, help="for all of it (default: %(default)s)")
    flags.add_argument("--out", type=Path, help="write everything to this file, after every section")
    flags.add_argument("--resume", action="store_true", help="keep the sections of --out's file that passed")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    flags.add_argument("--at-once", type=int, help="sections side by side (default: 1, in a rehearsal 2)")
    args = flags.parse_args(argv)
    at_once = args.at_once or (2 if args.rehearse else 1)
    if args.minutes <= 0 or at_once < 1:
        flags.error("--minutes and --at-once must be more than 0")
    if args.resume and args.out is None:
        flags.error("--resume needs --out: the file that has what was done")
    found = gpu()
    if found is None and not args.rehearse:
        print("bench.gpu: torch sees no GPU; --rehearse shows on a CPU that this script works", file=sys.stderr)
        return 2
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if args.rehearse:
        # One thread each: side by side more of them would wait for each other's cores.
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    print(found["name"] if found and not args.rehearse else f"rehearsal: {machine.headline()}", flush=True)
    results = passed_before(args.out, args.rehearse) if args.resume else []
    left = [section for section in args.only if section not in {result.section for result in results}]
    about = {"rehearsal": args.rehearse, "gpu": found, "machine": machine.describe()}
    lock = threading.Lock()
    parts = parts_of(args.out, args.rehearse) if args.out is not None else None
    if parts is not None:
        if not args.resume:
            shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True, exist_ok=True)

    def run(section: str, seconds: float) -> None:
        result = run_section(section, flags_of(section, seconds, args.rehearse, args.resume), seconds, env, parts)
        with lock:
            results.append(result)
            print(f"== {section}: {result.ended}, {result.seconds:.0f} s")
            print("\n".join(result.output.splitlines()[-_TAIL_LINES:]), flush=True)
            if args.out is not None:
                sections = {r.section: asdict(r) for r in results}
                written = {**about, "sections": sections}
                write_figures(args.out, written)
                args.out.with_suffix(".md").write_text(tables(written), encoding="utf-8")

    run_in_turn(run, left, 60 * args.minutes, at_once)
    for result in results:
        if result.ended == "not run":
            print(f"{result.section} was not run: {' '.join(result.output.splitlines()[-1:])}")
    for result in results:
        if not result.complete:
            print(f"{result.section} is not complete; --resume with --out's file goes on with it")
    failed = [r.section for r in results if not r.ok and r.ended != "not run"]
    passed = sum(r.ok for r in results)
    print(f"failed: {', '.join(failed)}" if failed else f"{passed} of {len(results)} sections passed, none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
