"""What both rehearsals need of the machine: tools, sshd and rsync, a home of their own, and words for the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "rayup"
BIN = Path(sys.executable).parent
PACKAGES = ("openssh-server", "rsync", "libpopt0", "libwrap0", "libxxhash0")


# ---------------------------------------------------------------- words


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stop(text: str) -> NoReturn:
    sys.exit(f"test-rayup: {text}")


def wait_for(true: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Ask again and again, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            stop(f"waited {timeout_s:g} s for {what() if callable(what) else what}")
        time.sleep(0.1)


@contextmanager
def phase(name: str, took: dict[str, float]) -> Iterator[None]:
    """A part of a rehearsal; notes its seconds in `took`."""
    say(f"== {name}")
    began = time.monotonic()
    try:
        yield
    finally:
        took[name] = time.monotonic() - began


# ---------------------------------------------------------------- tools


def daemon(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", str(BUILD / "bin")]))


def path_of_hosts() -> str:
    """`PATH` on every host: this environment's commands, and rsync."""
    return os.pathsep.join([str(BIN), str(BUILD / "bin"), os.environ.get("PATH", os.defpath)])


def unpack() -> None:
    """sshd and rsync from Debian packages into build/rayup, behind wrappers that find their libraries."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        stop("needs sshd and rsync: install openssh-server and rsync")
    say("unpacking sshd and rsync into build/rayup")
    BUILD.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        stop(f"can't get sshd and rsync ({done.stderr.strip()[-200:]}): install openssh-server and rsync")
    for package in BUILD.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, BUILD / "root"], check=True)
    (BUILD / "bin").mkdir(exist_ok=True)
    libraries = ":".join(str(path) for path in (BUILD / "root").glob("**/*-linux-gnu") if path.is_dir())
    for place, name in (("sbin", "sshd"), ("bin", "rsync")):
        wrapper = BUILD / "bin" / name
        real = BUILD / "root" / "usr" / place / name
        wrapper.write_text(f'#!/bin/sh\nexport LD_LIBRARY_PATH="{libraries}"\nexec "{real}" "$@"\n')
        wrapper.chmod(0o755)


# ---------------------------------------------------------------- a home


@contextmanager
def operator() -> Iterator[Path]:
    """A home of the operator's own, with keys for ssh and what sshd asks of a machine; yields the home.

    To be used in a mount namespace of its own, in which the users of this machine become those of the rehearsal.
    """
    work = Path(tempfile.mkdtemp(prefix="rayup-"))
    before = set(Path("/tmp").glob("ray_ssh_*"))
    home = work / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (work / "ray").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / ".ssh" / "id_ed25519"], check=True)
    (work / "passwd").write_text(passwd(home))
    (work / "shadow").write_text(SHADOW)
    for name in ("passwd", "shadow"):
        subprocess.run(["mount", "--bind", work / name, f"/etc/{name}"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ.update(HOME=str(home), PATH=path_of_hosts(), PYTHONPATH=str(ROOT), RAY_TMPDIR=str(work / "ray"))
    try:
        yield home
    finally:
        for folder in (work, *(set(Path("/tmp").glob("ray_ssh_*")) - before)):
            shutil.rmtree(folder, ignore_errors=True)


SHADOW = "root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n"


def passwd(home: Path) -> str:
    return f"root:x:0:0:root:{home}:/bin/bash\nsshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n"


def sshd_config(addresses: tuple[str, ...], host_key: Path, authorized: Path, environment: dict[str, str]) -> str:
    given = " ".join(f'{name}="{value}"' for name, value in environment.items())
    return (
        "".join(f"ListenAddress {address}\n" for address in addresses)
        + f"Port 22\nHostKey {host_key}\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
        + f"AuthorizedKeysFile {authorized}\nStrictModes no\nMaxStartups 50\nSetEnv {given}\n"
    )


def ssh(home: Path, address: str) -> list[str]:
    quiet = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    return ["ssh", "-i", str(home / ".ssh" / "id_ed25519"), *quiet, f"root@{address}"]


def reachable(home: Path, address: str) -> bool:
    done = subprocess.run([*ssh(home, address), "true"], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def ray(*arguments: str, timeout_s: float = 180, tries: int = 1) -> None:
    """Run `ray` on the operator's machine. `tries`: of an `up`, as a node has 30 s to start in, whatever else runs."""
    say("ray " + " ".join(arguments[:2]))
    log = Path(os.environ["HOME"]) / f"ray-{arguments[0]}.log"
    for left in reversed(range(tries)):
        try:
            # A file and no pipe: ssh's control master would hold a pipe open.
            with log.open("wb") as file:
                subprocess.run(["ray", *arguments], stdout=file, stderr=file, timeout=timeout_s, check=True)
        except subprocess.SubprocessError as error:
            said = f"ray {arguments[0]} failed: {error}"
            if not left:
                stop(f"{said}\n{log.read_text()[-4000:]}")
            say(f"{said.splitlines()[0]}; once more")
        else:
            return


def strangers(own: set[int]) -> list[str]:
    """Command lines of processes that should be gone by now; `own`: pids of those that may be there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:100] or process.name())
        except psutil.Error:
            continue
    return found
