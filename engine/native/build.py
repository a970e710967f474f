"""Compile the kernels beside this file, once a machine, into the user's cache folder.

The file's name is a digest of all that its contents depend on: the sources, the flags, the compiler and the
processor (code is made for this one). It is written under another name and renamed, so that processes that start
together may each compile it, and none loads half a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fopenmp")
_SOURCES = ("vector.h", "rows.h", "gemm.h", "attention.h", "kernels.cpp")
_CODE = {name: (Path(__file__).parent / name).read_bytes() for name in _SOURCES}
"""Read with the Python code that calls it: an update under a running worker changes neither."""
_COMPILE_TIMEOUT_S = 120.0


class NativeUnavailable(Exception):
    """Raised when the kernels can't be compiled or loaded here; says why in one line."""


@cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels. Takes milliseconds, and some seconds where they must be compiled first.

    Raises `NativeUnavailable`, each time it is asked again.
    """
    compiler = _compiler()
    about = [_output([compiler, "--version"]), _processor(), *_FLAGS, *map(str, _openmp())]
    digest = hashlib.sha256(b"\0".join([*_CODE.values(), *(text.encode() for text in about)])).hexdigest()[:20]
    path = _cache_folder() / f"kernels-{digest}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} can't be loaded: {error}") from None


def _compiler() -> str:
    """g++ or what `CXX` names."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NativeUnavailable("no C++ compiler was found (g++, or what CXX names)")


def _processor() -> str:
    """What the code is made for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp() -> list[Path]:
    """The OpenMP library that torch brings: two of them in a process would each have threads, and spin."""
    return sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]


def _cache_folder() -> Path:
    """A folder that nobody else can write to."""
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


def _compile(compiler: str, path: Path) -> None:
    openmp = _openmp()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as made:
        for name, code in _CODE.items():
            (Path(made) / name).write_bytes(code)
        source = Path(made) / "kernels.cpp"
        part, whole = Path(made) / "kernels.o", Path(made) / "kernels.so"
        _output([compiler, *_FLAGS, "-fPIC", "-c", str(source), "-o", str(part)])
        _output([compiler, "-shared", str(part), *(map(str, openmp) if openmp else ["-fopenmp"]), "-o", str(whole)])
        whole.replace(path)
    log.info("compiled the CPU kernels path=%s", path)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} failed: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailable(f"{command[0]} failed: {first}")
    return done.stdout
