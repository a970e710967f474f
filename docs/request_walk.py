"""Counts the files and functions that are really entered for a request, a page, a hand-over, a scale-up and a start.

`python docs/request_walk.py` starts `twinpool serve` with a profile function in each of its processes, runs each walk
once warm, and prints for each walk: files and functions entered that an idle cluster doesn't enter, calls of them, and
moves from one file to another that return to a file that was left before. `--calls` prints the calls that each further
token of an answer costs, by file; `--files` prints the files of each walk.

Requests and pages are walked in one process (`transfer.plane=local`: router, prefill and decode without gRPC, streams
and shared memory); the start and the scale-up in processes under Ray, as `twinpool serve` starts them.

The second part counts the walk of a request that docs/architecture.md describes in tables.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path
from typing import NamedTuple

import httpx

ROOT = Path(__file__).parents[1]
LOCAL = ("--set", "transfer.plane=local")
PAGE = Path(__file__).parent / "architecture.md"
COMMAND = (sys.executable, "-P", "-m", "twinpool.cli.commands")
READY = "Twinpool is ready: "
START_S, SETTLE_S = 180.0, 2.0
"""Seconds that a start may take; and that a cluster is left alone so that it is idle."""
TOKENS, PAIRS = 24, 3

HOOK = '''
"""A profile function in every Python process of a cluster. One byte of DIR/phase is the number of the walk under way,
0 for none; what was called in a walk is written to DIR/<walk>-<pid>.json when it is over."""
import json, mmap, os, sys, threading, time
DIR, ROOT = {folder!r}, {root!r} + os.sep
with open(os.path.join(DIR, "phase"), "rb") as file:
    PHASE = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
names, last, calls, left = {{}}, {{}}, {{}}, {{}}

def called(frame, event, argument):
    if event != "call" or not PHASE[0]:
        return
    code = frame.f_code
    name = names.get(code)
    if name is None:
        file = code.co_filename
        inside = file.startswith(ROOT) and code.co_name != "<module>" and frame.f_back is not None
        name = names[code] = (file[len(ROOT):], code.co_qualname) if inside else ()
    if name:
        walk, thread = PHASE[0], threading.get_ident()
        counts = calls.setdefault(walk, {{}})
        counts[name] = counts.get(name, 0) + 1
        seen = left.setdefault((walk, thread), [None, set(), 0])
        if seen[0] != name[0]:
            seen[2] += name[0] in seen[1]
            seen[0] = name[0]
            seen[1].add(name[0])

def write():
    while True:
        now = PHASE[0]
        for walk in [w for w in list(calls) if w != now]:
            counts = calls.pop(walk)
            returns = sum(left.pop(key)[2] for key in [k for k in list(left) if k[0] == walk])
            path = os.path.join(DIR, f"{{walk}}-{{os.getpid()}}.json")
            with open(path + ".part", "w") as out:
                json.dump([returns, [[*name, count] for name, count in counts.items()]], out)
            os.rename(path + ".part", path)
        time.sleep(0.02)

if "twinpool" in " ".join(sys.orig_argv) or "default_worker" in " ".join(sys.orig_argv):
    threading.setprofile(called)
    threading.Thread(target=write, daemon=True).start()
    sys.setprofile(called)
'''


@dataclass
class Walk:
    """The functions that one walk entered: `calls` of each (file, name)."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    returns: int = 0
    seconds: float = 0.0

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.calls})

    def without(self, idle: Walk) -> Walk:
        """The walk less the functions that an idle cluster enters too."""
        return Walk(Counter({k: n for k, n in self.calls.items() if k not in idle.calls}), self.returns)

    def more_than(self, less: Walk, idle: Walk) -> Walk:
        """The calls that this walk has beyond a shorter one of the same kind, and beyond idling for longer; functions
        that each second token calls, at least."""
        seconds = self.seconds - less.seconds
        more = {k: n - less.calls[k] - round(idle.calls[k] * seconds / idle.seconds) for k, n in self.calls.items()}
        return Walk(Counter({k: n for k, n in more.items() if n >= TOKENS // 2}))

    def __str__(self) -> str:
        by_part = Counter(file.split("/")[0] for file in self.files)
        parts = ", ".join(f"{part} {count}" for part, count in by_part.most_common())
        return (
            f"{len(self.files)} files ({parts}), {len(self.calls)} functions, {sum(self.calls.values())} calls, "
            f"{self.returns} returns to a file"
        )


class Profiled:
    """A `twinpool serve` with the profile function in its processes."""

    def __init__(self, folder: Path, *flags: str, from_start: bool = False) -> None:
        """`from_start`: the start is the first walk; `walk(None)` ends and returns it. Raises `TimeoutError`."""
        self._walks = 1 if from_start else 0
        self._logs = folder / "logs"
        hook = folder / "hook"
        for path in (self._logs, hook):
            path.mkdir(parents=True)
        (self._logs / "phase").write_bytes(bytes([self._walks]))
        (hook / "sitecustomize.py").write_text(HOOK.format(folder=str(self._logs), root=str(ROOT / "twinpool")))
        with (self._logs / "phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TWINPOOL_", "RAY_"))}
        paths = os.pathsep.join([str(hook), str(ROOT)])
        runtime = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        self._environment = kept | runtime | {"PYTHONPATH": paths}
        command = [*COMMAND, "serve", "--model", "demo", "--port", "0", *flags]
        self._output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            command, env=self._environment, cwd=folder, stdout=self._output, stderr=subprocess.STDOUT
        )
        self.url = self._wait(self._ready, START_S, "the cluster to be ready")

    def _ready(self) -> str | None:
        text = Path(self._output.name).read_text()
        if self.process.poll() is not None:
            raise TimeoutError(f"twinpool serve ended:\n{text}")
        found = re.search(rf"{READY}(\S+)", text)
        return found and found[1].rstrip("/").removesuffix("/v1")

    @staticmethod
    def _wait(look: Callable[[], str | None], timeout_s: float, what: str) -> str:
        end = time.monotonic() + timeout_s
        while (found := look()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
            time.sleep(0.05)
        return found

    def walk(self, run: Callable[[], object] | None) -> Walk:
        """Run a walk, and return what was called in it. None: end the walk of the start."""
        seconds = 0.0
        if run is not None:
            time.sleep(SETTLE_S)
            self._walks += 1
            self._phase[0] = self._walks
            began = time.monotonic()
            run()
            seconds = time.monotonic() - began
        self._phase[0] = 0
        time.sleep(SETTLE_S)
        walk = Walk(seconds=seconds)
        for path in self._logs.glob(f"{self._walks}-*.json"):
            returns, calls = json.loads(path.read_text())
            walk.returns += returns
            for file, name, count in calls:
                walk.calls[file, name] += count
        return walk

    def chat(self, tokens: int = TOKENS, words: str = "Tell me of the sea", timeout_s: float = 60.0) -> str:
        """A streamed chat of exactly `tokens`; returns its text."""
        text = ""
        body = {
            "model": "demo", "messages": [{"role": "user", "content": words}], "stream": True, "temperature": 0,
            "max_tokens": tokens, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        return text

    def operate(self, *words: str) -> str:
        done = subprocess.run(
            [*COMMAND, *words], env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise RuntimeError(f"twinpool {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self._output.close()


@contextmanager
def profiled(*flags: str, from_start: bool = False) -> Iterator[Profiled]:
    with tempfile.TemporaryDirectory() as temporary:
        cluster = Profiled(Path(temporary), *flags, from_start=from_start)
        try:
            yield cluster
        finally:
            cluster.end()


# ------------------------------------------------------------ the walks


def chat_walks() -> dict[str, Walk]:
    """A streamed chat, and what each further token of it calls: the least of `PAIRS` chats and longer ones, because
    how often a waiting process looks up hangs on what else the machine does."""
    with profiled(*LOCAL) as cluster:
        for _ in range(2):
            cluster.chat(2 * TOKENS)
        idle = cluster.walk(lambda: time.sleep(SETTLE_S))
        shorts = [cluster.walk(cluster.chat) for _ in range(PAIRS)]
        longs = [cluster.walk(lambda: cluster.chat(2 * TOKENS)) for _ in range(PAIRS)]
    tokens = [long.more_than(short, idle) for short, long in zip(shorts, longs, strict=True)]
    least = Walk(reduce(and_, (token.calls for token in tokens)))
    return {"a streamed chat of 24 tokens": shorts[0].without(idle), "24 further tokens": least}


def page_walks() -> dict[str, Walk]:
    """A prompt whose finished pages go to the host and to a storage; and the same one in another cluster."""
    words = " ".join(f"The {number}th wave of the sea comes and goes." for number in range(30))
    with tempfile.TemporaryDirectory() as folder:
        storage = (*LOCAL, "--set", "cache.storage.backend=file", "--set", f"cache.storage.path={folder}/storage")
        storage += ("--set", "cache.host_bytes=67108864")
        with profiled(*storage) as cluster:
            cluster.chat()
            idle = cluster.walk(lambda: time.sleep(SETTLE_S))

            def write() -> None:
                cluster.chat(words=words)
                time.sleep(SETTLE_S)

            there = cluster.walk(write).without(idle)
        with profiled(*storage) as cluster:
            cluster.chat(words="Tell me of the woods")
            idle = cluster.walk(lambda: time.sleep(SETTLE_S))
            back = cluster.walk(lambda: cluster.chat(words=words)).without(idle)
    state = ("cache", "transfer")
    walks = {"a page to storage": there, "a page back from storage": back}
    return {
        name: Walk(Counter({k: n for k, n in walk.calls.items() if k[0].split("/")[0] in state}), walk.returns)
        for name, walk in walks.items()
    }


def retract_walk() -> dict[str, Walk]:
    """What a hand-over enters when its request is retracted to host memory and resumes, beyond a plain chat."""
    flags = ("--set", "faults.retract_every=6", "--set", "cache.host_bytes=67108864", "--set", "decode.retract=copy")
    with profiled(*LOCAL) as cluster:
        cluster.chat()
        plain = cluster.walk(cluster.chat)
    with profiled(*LOCAL, *flags) as cluster:
        cluster.chat()
        return {"a hand-over retracted and resumed, beyond a chat": cluster.walk(cluster.chat).without(plain)}


def cluster_walks() -> dict[str, Walk]:
    """The start of a cluster of processes, and one more decode worker."""
    with profiled(from_start=True) as cluster:
        start = cluster.walk(None)
        cluster.chat()
        idle = cluster.walk(lambda: time.sleep(SETTLE_S))

        def scale() -> None:
            cluster.operate("scale", "decode=2")
            end = time.monotonic() + START_S
            while sum(w["state"] == "ready" for w in json.loads(cluster.operate("status", "--json"))["workers"]) < 3:
                if time.monotonic() > end:
                    raise TimeoutError("a second decode worker")
                time.sleep(1)

        return {"a start": start, "one more decode worker (scale)": cluster.walk(scale).without(idle)}


WALKS = {"chat": chat_walks, "page": page_walks, "retract": retract_walk, "cluster": cluster_walks}


# ------------------------------------------------------------ the walk in docs/architecture.md


class Stop(NamedTuple):
    path: str
    name: str
    """The function or class to read there."""


def stops(page: str) -> list[Stop]:
    rows = re.findall(r"^\| `([\w./]+\.py)` \| `(\w+)` \| .+ \|$", page, re.MULTILINE)
    return [Stop(*row) for row in rows]


def counted(page: str) -> tuple[int, list[Stop]]:
    """How many files the tables open, and where they return to one that an earlier row named."""
    walk = stops(page)
    returns = [stop for number, stop in enumerate(walk) if stop.path in {before.path for before in walk[:number]}]
    return len({stop.path for stop in walk}), returns


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Count the files and functions that a request, a page, ... enter."
    )
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], help=f"{', '.join(WALKS)}; default: all")
    parser.add_argument("--files", action="store_true", help="print the files, with the functions entered in each")
    parser.add_argument("--calls", action="store_true", help="print the calls by file")
    options = parser.parse_args()
    for name in options.walks or WALKS:
        for title, walk in WALKS[name]().items():
            print(f"{title}: {walk}", flush=True)
            if title.endswith("further tokens"):
                print(f"  each: {sum(walk.calls.values()) / TOKENS:.0f} calls")
            for file in walk.files if options.files or options.calls else ():
                functions = {name: n for (path, name), n in walk.calls.items() if path == file}
                print(f"  {file}: {sum(functions.values())}" + (f" {functions}" if options.files else ""))


if __name__ == "__main__":
    main()
