"""Everything that runs on a GPU, checked and measured by one command in some minutes.

    python -m bench.gpu --out gpu.json              # all sections
    python -m bench.gpu --only copies engine        # some of them
    python -m bench.gpu --out gpu.json --resume     # what gpu.json doesn't have yet, or what failed there
    python -m bench.gpu --rehearse                  # on a CPU, in small: does this script work?

Sections: `kernels` (the Triton kernels: right, invariant, and how fast beside torch's own), `families` (every family
through both workers with their state on the GPU, against transformers: hand-over, tiers, retraction, migration,
damage), `copies` (what goes between the device and pinned host memory beside one plain copy of as many bytes, and
whether it comes back as it went), `handover` (planes `staged` and `cuda_ipc` between two processes on one card, every
byte compared), `engine` (prefill and decode of a model with random weights beside transformers on the same GPU, and
whether the tokens agree). Each is a process of its own with a deadline: one that fails or hangs costs the others
nothing. What each printed and its figures go into one file. Exit code 1 when a section failed.

Needs torch with CUDA, triton and transformers, and nothing that a cluster needs: no ray, and pyzmq and msgpack for
`families` and `handover` alone. A rehearsal says nothing about a GPU; its file says that it was one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import machine

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "kernels": "bench.kernels",
    "families": "bench.gpu.gpu_families",
    "copies": "bench.gpu.gpu_copies",
    "handover": "bench.gpu.gpu_handover",
    "engine": "bench.gpu.gpu_engine",
}
_SCENES_SHARE = 0.85
"""Part of its time after which section `families` begins no other scene."""
_TAIL_LINES = 40
"""Of what a section printed, what goes to the screen."""


@dataclass(frozen=True)
class SectionResult:
    """What one section came to."""

    section: str
    ok: bool
    seconds: float
    ended: str
    """Exit code, or that its time was over."""
    output: str
    figures: dict[str, Any] | None
    """What it wrote; None: nothing."""


def run_section(section: str, extra: Sequence[str], deadline_s: float, env: dict[str, str]) -> SectionResult:
    """One section in a process of its own, which is gone at the end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", MODULES[section], "--json", str(out), *extra]
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            try:
                output, _ = child.communicate(timeout=deadline_s)
                ended = f"exit code {child.returncode}"
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.communicate()
                ended = f"not done after {deadline_s:.0f} s"
        ok = child.returncode == 0
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return SectionResult(section, ok, time.monotonic() - began, ended, output, figures)


def passed_before(out: Path, rehearsal: bool) -> list[SectionResult]:
    """The sections that passed when `out` was written. Raises `SystemExit` where it is of a rehearsal and this is none,
    or the other way round."""
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


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), help="default: all")
    flags.add_argument("--minutes", type=float, default=9.0, help="for all of it (default: %(default)s)")
    flags.add_argument("--out", type=Path, help="write everything to this file, after every section")
    flags.add_argument("--resume", action="store_true", help="keep the sections of --out's file that passed")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if args.minutes <= 0:
        flags.error("--minutes must be more than 0")
    if args.resume and args.out is None:
        flags.error("--resume needs --out: the file that has what was done")
    found = gpu()
    if found is None and not args.rehearse:
        print("bench.gpu: torch sees no GPU; --rehearse shows on a CPU that this script works", file=sys.stderr)
        return 2
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    extra: dict[str, list[str]] = {section: [] for section in MODULES}
    if args.rehearse:
        env["TRITON_INTERPRET"] = "1"
        for section in ("families", "copies", "handover", "engine"):
            extra[section] = ["--rehearse"]
    print(found["name"] if found and not args.rehearse else f"rehearsal: {machine.headline()}", flush=True)
    ends_at = time.monotonic() + 60 * args.minutes
    results = passed_before(args.out, args.rehearse) if args.resume else []
    left = [section for section in args.only if section not in {result.section for result in results}]
    for number, section in enumerate(left):
        share = max(1.0, (ends_at - time.monotonic()) / (len(left) - number))
        seconds = ["--seconds", f"{_SCENES_SHARE * share:.0f}"] if section == "families" else []
        result = run_section(section, [*extra[section], *seconds], share, env)
        results.append(result)
        print(f"== {section}: {result.ended}, {result.seconds:.0f} s")
        print("\n".join(result.output.splitlines()[-_TAIL_LINES:]), flush=True)
        if args.out is not None:
            about = {"rehearsal": args.rehearse, "gpu": found, "machine": machine.describe()}
            sections = {r.section: asdict(r) for r in results}
            args.out.write_text(json.dumps({**about, "sections": sections}, indent=1) + "\n", encoding="utf-8")
    failed = [r.section for r in results if not r.ok]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(results)} sections passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
