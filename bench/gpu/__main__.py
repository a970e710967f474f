"""Everything that runs on a GPU, checked and measured by one command in some minutes.

    python -m bench.gpu --out gpu.json              # all sections
    python -m bench.gpu --only copies engine        # some of them
    python -m bench.gpu --out gpu.json --resume     # those that gpu.json doesn't have yet, or that failed there
    python -m bench.gpu --rehearse                  # on a CPU, in small: does this script work?

Sections: `kernels` (the Triton kernels: right, invariant, and how fast beside torch's own), `families` (every family
through both workers with their state on the GPU, against transformers: hand-over, tiers, retraction, migration,
damage), `copies` (what goes between the device and pinned host memory beside one plain copy of as many bytes, alone and
beside products, and whether it comes back as it went), `handover` (planes `staged`, `cuda_ipc` and `nixl` between two
processes on one card, every byte compared), `engine` (prefill and decode of models with random weights beside
transformers on the same GPU, and whether the tokens agree), `serving` (whole workers: exposed time of the hand-over,
goodput of two pools and of a colocated worker beside transformers' continuous batching). Each is a process of its own
with a deadline, its part of what is left (`WEIGHTS`): one that fails or hangs costs the others nothing, and one whose
time is over leaves what it had by then. What each printed, with what the GPU would allow beside each figure, and all
figures go into one file. Exit code 1 when a section failed or was not done in its time.

Needs torch with CUDA, triton, transformers, msgpack, msgspec, grpcio, xxhash, psutil and rich, and neither ray nor a
network. Without pyzmq workers tell each other of rooms by queues (`tests/support/process_sockets.py`), and what is
between processes is told as not run: section `handover`, and the scene through bounce buffers. A rehearsal says nothing
about a GPU; its file says that it was one.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from bench.common.bench_report import describe, flag_parser, headline, write_figures

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "kernels": "bench.kernels",
    "families": "tests.support.gpu_families",
    "copies": "bench.gpu.gpu_copies",
    "handover": "bench.gpu.gpu_handover",
    "engine": "bench.gpu.gpu_engine",
    "serving": "bench.gpu.gpu_serving",
}
WEIGHTS = {"kernels": 110, "families": 110, "copies": 25, "handover": 25, "engine": 110, "serving": 160}
"""Seconds of nine minutes; what a section leaves is the others'."""
NOT_RUN = 77
"""Exit code of a section that can't be run on this machine."""
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


def run_section(section: str, extra: Sequence[str], deadline_s: float, env: dict[str, str]) -> SectionResult:
    """One section in a process of its own, which is gone at the end with all that it began."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        out = Path(folder) / f"{section}.json"
        command = [sys.executable, "-m", MODULES[section], "--json", str(out), *extra]
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(timeout=deadline_s)
                ended = "not run" if child.returncode == NOT_RUN else f"exit code {child.returncode}"
            except subprocess.TimeoutExpired:
                _kill_all(child)
                output, _ = child.communicate()
                ended = f"not done after {deadline_s:.0f} s"
            finally:
                _kill_all(child)
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return SectionResult(section, child.returncode == 0, time.monotonic() - began, ended, output, figures)


def _kill_all(child: subprocess.Popen[str]) -> None:
    """A section's process, and those that it began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def passed_before(out: Path, rehearsal: bool) -> list[SectionResult]:
    """The sections that had passed when `out` was written.

    Raises `SystemExit` where it is of a rehearsal and this is none, or the other way round.
    """
    if not out.exists():
        return []
    written = json.loads(out.read_text(encoding="utf-8"))
    if written["rehearsal"] != rehearsal:
        raise SystemExit(f"bench.gpu: {out} is {'' if written['rehearsal'] else 'not '}of a rehearsal")
    return [SectionResult(**section) for section in written["sections"].values() if section["ok"]]


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
    flags = flag_parser(__doc__, json_file=False)
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
    print(found["name"] if found and not args.rehearse else f"rehearsal: {headline()}", flush=True)
    results = passed_before(args.out, args.rehearse) if args.resume else []
    left = [section for section in args.only if section not in {result.section for result in results}]
    about = {"rehearsal": args.rehearse, "gpu": found, "machine": describe()}
    lock = threading.Lock()

    def run(section: str, seconds: float) -> None:
        # The kernels are rehearsed by Triton's interpreter alone.
        extra = ["--rehearse"] if args.rehearse and section != "kernels" else []
        result = run_section(section, extra, seconds, env)
        with lock:
            results.append(result)
            print(f"== {section}: {result.ended}, {result.seconds:.0f} s")
            print("\n".join(result.output.splitlines()[-_TAIL_LINES:]), flush=True)
            write_figures(args.out, {**about, "sections": {r.section: asdict(r) for r in results}})

    run_in_turn(run, left, 60 * args.minutes, at_once)
    for result in results:
        if result.ended == "not run":
            print(f"{result.section} was not run: {' '.join(result.output.splitlines()[-1:])}")
    failed = [r.section for r in results if not r.ok and r.ended != "not run"]
    passed = sum(r.ok for r in results)
    print(f"failed: {', '.join(failed)}" if failed else f"{passed} of {len(results)} sections passed, none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
