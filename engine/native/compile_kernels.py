"""Compilation of the C++ kernels beside this file, once a machine, into the user's cache folder.

The library's name is a digest of all that its contents depend on: the sources, the flags, the compiler and the
processor (code is made for this one). The library is written under another name and renamed, so that none loads half a
file; of processes that start together one compiles it, and the others wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic, sleep

import torch

from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.python_command import module_command

log = logging.getLogger(__name__)

MACHINE = "native"
"""The level that stands for all instructions of this processor, in compilers' own word."""
COMMON = "common"
"""The level that stands for all instructions of this processor, in the order of additions that every level has: its
bits are those of each of `contracts.cpu_levels`."""
_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-Wno-psabi", "-fPIC",
    "-fvisibility=hidden",
)  # fmt: skip
_SOURCES = (
    "lanes.h",
    "vector.h",
    "buffer.h",
    "threads.h",
    "chains.h",
    "rows.h",
    "low_rank.h",
    "gemm.h",
    "block_gemm.h",
    "tile_gemm.h",
    "int8_gemm.h",
    "attention.h",
    "recurrence.h",
    "kernels.cpp",
)
_CODE = {name: (Path(__file__).parent / name).read_bytes() for name in _SOURCES}
"""The sources, read when this module is imported, so that an update under a running worker changes neither them nor
the Python code that calls them."""
_COMPILE_TIMEOUT_S = 600.0
_LOOK_S = 0.1


class NativeUnavailable(Exception):
    """Raised when the kernels can't be compiled or loaded here; its text says why in one line."""


@cache
def load_library(level: str = MACHINE) -> ctypes.CDLL:
    """Load the kernels, compiled for the instructions of `level` (of `contracts.cpu_levels`; `MACHINE` and
    `COMMON`: all that this machine has). Takes milliseconds, or some seconds where they must be compiled first.

    Raises `NativeUnavailable`; only a success is cached, so that a later call tries again.
    """
    if level not in {MACHINE, COMMON, *processor.levels()}:
        raise NativeUnavailable(f"this processor can't run {level}")
    compiler = find_compiler()
    about = [
        _output([*compiler.command, *compiler.version]), _processor(),
        *compiler.compiling(level), *compiler.linking, *map(str, _openmp()),
    ]  # fmt: skip
    digest = hashlib.sha256(b"\0".join([*_CODE.values(), *(text.encode() for text in about)])).hexdigest()[:20]
    path = _cache_folder() / f"kernels-{digest}.so"
    with _alone(path):
        if not path.exists():
            _compile(compiler, level, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} can't be loaded: {error}") from None


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine, and how it is called."""

    command: tuple[str, ...]
    version: tuple[str, ...]
    """The arguments that make it print its version."""
    zig: bool = False
    """Whether it is Zig's: Clang, with its own headers and no built C++ library, which the kernels don't need."""

    def compiling(self, level: str) -> tuple[str, ...]:
        order = ("-DCOMMON_ORDER",) if level == COMMON else ()
        wanted = MACHINE if level == COMMON else level
        if not self.zig:
            return (f"-march={wanted}", *order, *_FLAGS)
        # Zig writes levels with underscores, and catches what C++ leaves undefined unless told otherwise.
        instructions = f"-mcpu={wanted.replace('-', '_')}"
        return ("-target", f"{platform.machine()}-linux-gnu", instructions, *order, *_FLAGS, *_ZIG)

    @property
    def linking(self) -> tuple[str, ...]:
        return ("-target", f"{platform.machine()}-linux-gnu", "-shared", "-nostdlib") if self.zig else ("-shared",)


_ZIG = ("-fno-sanitize=undefined",)


def find_compiler() -> Compiler:
    """Find the compiler: ``CXX``, else g++, else c++, else the package ziglang's. Raises `NativeUnavailable`."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return Compiler((found,), ("--version",))
    if importlib.util.find_spec("ziglang") is not None:
        return Compiler(tuple(module_command("ziglang", "c++")), ("--version",), zig=True)
    raise NativeUnavailable(
        "no C++ compiler was found; install g++, name one in CXX, or add the package ziglang: pip install "
        "'twinpool[kernels]'"
    )


def _processor() -> str:
    """The processor that code is compiled for: its lines of /proc/cpuinfo that tell models apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp() -> list[Path]:
    """The OpenMP library that torch brings: two OpenMP libraries in a process would each have threads, and spin."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]


def _cache_folder() -> Path:
    """The cache folder, which no other user can write to. Raises `NativeUnavailable` where there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # stays so where nobody is at home
    for folder in (Path(home) / "twinpool", Path(tempfile.gettempdir()) / f"twinpool-{os.getuid()}"):
        if not folder.is_absolute():
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError:
            continue
        if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, 7):
            return folder
    raise NativeUnavailable("neither the cache folder nor the temporary folder can be written to safely")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of a library's folder while it is compiled, so that of processes that start together one does.

    Ends the wait when the library is there, and when a compilation would have been given up. The system lets go of the
    lock of a process that ends.
    """
    if path.exists():
        yield
        return
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = monotonic() + _COMPILE_TIMEOUT_S
        while not path.exists() and monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sleep(_LOOK_S)
            except OSError:  # This file system has no locks.
                break
        yield
    finally:
        os.close(lock)


def _compile(compiler: Compiler, level: str, path: Path) -> None:
    openmp = _openmp()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as made:
        for name, code in _CODE.items():
            (Path(made) / name).write_bytes(code)
        source = Path(made) / "kernels.cpp"
        part, whole = Path(made) / "kernels.o", Path(made) / "kernels.so"
        libraries = map(str, openmp) if openmp else ["-lgomp"]
        _output([*compiler.command, *compiler.compiling(level), "-c", str(source), "-o", str(part)])
        _output([*compiler.command, *compiler.linking, str(part), *libraries, "-o", str(whole)])
        whole.replace(path)
    log.info("compiled the CPU kernels path=%s", path)


def _output(command: list[str]) -> str:
    # Zig's own caches go into Twinpool's cache folder and nowhere else.
    kept = {name: str(_cache_folder() / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False, env={**os.environ, **kept}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} failed: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailable(f"{command[0]} failed: {first}")
    return done.stdout
