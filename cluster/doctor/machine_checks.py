"""Checks of what this machine allows.

- Limits on this user's processes: descriptors, processes, locked memory, a control group's share.
- Calls that containers forbid and workers need, tried for real with a child process.
- The Python and the packages that are installed, against those that this build asks for.
- The clock, against the network's time and the ledger's server: certificates and keys end by it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import select
import subprocess
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from twinpool.cluster.assembly.node_shares import cores
from twinpool.cluster.controller.open_ledger import ledger_access
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, error, fine, sized, warning
from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.config.ledger_place import on_server
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.python_command import script_command
from twinpool.router.api.http_protocol import connection_limit

MIN_DESCRIPTORS = 1024
"""Descriptors without which a Ray with a few workers doesn't get on."""
MAX_DESCRIPTORS = 65_536
"""To which a router raises its own limit, where it may."""
RANK_THREADS = 120
"""Threads that a worker's process has, Ray's among them; Linux counts them as processes."""
OTHER_THREADS = 600
"""Threads of Ray's own processes, the routers, the controller."""


def check_descriptors(case: DoctorCase) -> Iterator[Finding]:
    """Open files: Ray's processes inherit the limit, and a router's clients are bounded by it."""
    soft, hard = (_number(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = case.config.router.max_connections
    allowed = connection_limit(case.config.router, min(max(soft, hard), MAX_DESCRIPTORS))
    if soft < MIN_DESCRIPTORS:
        yield error(
            f"a process may open {soft} files; a cluster needs {MIN_DESCRIPTORS}",
            f"ulimit -n {MAX_DESCRIPTORS} before the launch (LimitNOFILE= of a systemd unit)",
        )
    elif allowed < wanted:
        yield warning(
            f"a router may have {allowed} connections and not router.max_connections={wanted}: a process may open "
            f"{hard} files",
            "raise the hard limit (ulimit -Hn), or lower router.max_connections",
        )
    else:
        yield fine(f"open files: {soft}, at most {hard}")


def check_processes(case: DoctorCase) -> Iterator[Finding]:
    """Processes and threads, by the user's limit and by the control group's."""
    need = case.ranks * RANK_THREADS + OTHER_THREADS
    limits = {"ulimit -u": _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])}
    group = case.host.read(case.host.cgroup / "pids.max")
    if group.isdigit():
        used = case.host.read(case.host.cgroup / "pids.current")
        limits["the control group's pids.max, less what it has"] = int(group) - (int(used) if used.isdigit() else 0)
    short = {name: most for name, most in limits.items() if most < need}
    for name, most in short.items():
        yield error(
            f"{most} processes and threads are allowed ({name}), and {case.ranks} ranks take about {need}",
            "raise it, or have fewer workers",
            "threads that can't be started end Ray's processes with no word of the limit",
        )
    if not short:
        yield fine(f"processes and threads: about {need} needed, {min(limits.values())} allowed")


def check_locked_memory(case: DoctorCase) -> Iterator[Finding]:
    """Locked memory, which plane nixl registers with the network's card."""
    soft = _number(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    if case.config.transfer.plane == "nixl" and soft < 1 << 40:
        yield warning(
            f"a process may lock {sized(soft)} of memory, and transfer.plane=nixl registers all pools",
            "ulimit -l unlimited (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)",
            "where UCX can't register memory with the card it falls back to TCP",
        )
    else:
        yield fine(
            f"locked memory: {sized(soft) if soft < 1 << 50 else 'unlimited'}; plane {case.config.transfer.plane}"
        )


def check_processors(case: DoctorCase) -> Iterator[Finding]:
    """Cores for the ranks that compute here, and a quota that would stop them in mid-step."""
    there = cores(case.host.cgroup)
    if case.options.ray_address is not None:
        yield fine("workers' cores are those of the Ray's nodes")
        return
    quota, _, period = case.host.read(case.host.cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(quota) % int(period):
        yield warning(
            f"the control group has {int(quota) / int(period):g} cores: whoever has used its part waits in mid-step",
            "give it whole cores (docker run --cpus=N, or --cpuset-cpus)",
        )
    elif case.ranks > there and not case.wants_gpus:
        yield warning(
            f"{case.ranks} ranks compute on {there} cores: each step waits for others'",
            f"have at most {there} ranks on this machine",
        )
    else:
        yield fine(f"{there} cores for {case.ranks} ranks")


def _number(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


TRY_S = 10.0
_KEPT = array("B", b"!")
"""A byte of this process that a child reads."""
_SECCOMP = "run the container with --security-opt seccomp=unconfined, or a profile that allows it"
_CHILD = """
import ctypes, os, sys
fd = os.memfd_create("twinpool-doctor")
os.write(fd, b"seen")
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
into = ctypes.create_string_buffer(1)
mine, theirs = Span(ctypes.addressof(into), 1), Span(int(sys.argv[2]), 1)
libc = ctypes.CDLL(None, use_errno=True)
got = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
print(fd, got == 1, flush=True)
sys.stdin.read()
"""
"""Makes a segment, reads a byte of its parent's memory, says how both went, and waits."""


def check_container(case: DoctorCase) -> Iterator[Finding]:
    """Calls by which workers share memory and see each other's death."""
    wrong = False
    for finding in _tried(case):
        wrong = True
        yield finding
    group = case.host.read(case.host.cgroup / "memory.max")
    limit = f", memory limited to {int(group) >> 20:,} MiB" if group.isdigit() else ""
    if not wrong:
        yield fine(f"memory is shared and processes are watched{limit}")


def _tried(case: DoctorCase) -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("twinpool-doctor"))
    except OSError as problem:
        yield error(f"memfd_create fails: {problem.strerror}", _SECCOMP, "pools and host tiers lie in such memory")
        return
    byte = _KEPT.buffer_info()[0]
    child = subprocess.Popen(
        [*TIED, *script_command("-c", _CHILD, str(os.getpid()), str(byte))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield from _child_seen(case, child)
    finally:
        child.kill()
        child.communicate(timeout=TRY_S)


def _child_seen(case: DoctorCase, child: subprocess.Popen[str]) -> Iterator[Finding]:
    try:
        watched = os.pidfd_open(child.pid)
    except OSError as problem:
        yield error(f"pidfd_open fails: {problem.strerror}", _SECCOMP, "a worker's death is proven by it")
    else:
        os.close(watched)
    said = _line(child)
    if said is None:
        yield error("a child process doesn't get on", "look at this container's limits (ulimit -a)")
        return
    fd, read = said.split()
    try:
        with open(f"/proc/{child.pid}/fd/{fd}", "rb") as segment:
            segment.read(1)
    except OSError as problem:
        yield error(
            f"/proc/PID/fd of another process can't be opened: {problem.strerror}",
            "run all workers as one user in one user namespace, and /proc without hidepid; or transfer.plane=zmq",
            "plane shm writes through it",
        )
    if read != "True" and case.config.transfer.plane == "nixl":
        yield warning(
            "process_vm_readv of another process is refused (seccomp, or kernel.yama.ptrace_scope)",
            "docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
            "UCX copies within a host through shared memory then, which is slower",
        )


def _line(child: subprocess.Popen[str]) -> str | None:
    """The child's one line; None where it doesn't come in time."""
    assert child.stdout is not None
    poller = select.poll()
    poller.register(child.stdout, select.POLLIN)
    text = child.stdout.readline().strip() if poller.poll(1000 * TRY_S) else ""
    return text or None


MAX_SKEW_S = 2.0
ASK_S = 1.0
_UNSYNCHRONISED = 5
"""What `adjtimex` returns where nothing keeps the clock (TIME_ERROR)."""
_TIMEX_BYTES = 512


def check_clock(case: DoctorCase) -> Iterator[Finding]:
    """Whether something keeps the clock, where others go by theirs; and how far the ledger's server is from it."""
    kept = _synchronised()
    skew = _skew(case)
    if skew is not None and abs(skew) > MAX_SKEW_S:
        yield warning(
            f"this clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of the ledger's server",
            "have both kept by NTP (chronyd, systemd-timesyncd)",
            "leases go by durations and not by clocks; certificates, keys that end, and logs go by clocks",
        )
    elif case.several_hosts and kept is False:
        yield warning(
            "nothing keeps this machine's clock (the kernel says it isn't synchronised)",
            "run chronyd or systemd-timesyncd: certificates and keys end by each machine's own clock",
        )
    else:
        ledger = f"; {abs(skew):.2f} s from the ledger's server" if skew is not None else ""
        known = {True: "the clock is synchronised", False: "the clock is kept by nobody, and alone", None: "unknown"}
        yield fine(known[kept] + ledger)


def _synchronised() -> bool | None:
    """Whether the kernel says that the clock is synchronised; None where it doesn't say."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _UNSYNCHRONISED


def _skew(case: DoctorCase) -> float | None:
    """Seconds by which this clock is ahead of the ledger's server; None without one that answers."""
    place = case.config.cluster.ledger
    if not place or not on_server(place):
        return None
    try:
        import redis

        from twinpool.contracts.wire.redis_connection import open_redis

        client = open_redis(place, ASK_S, "cluster.ledger", ledger_access(case.config.security, case.host.environment))
    except (ImportError, ConfigError):
        return None
    try:
        before = case.host.now()
        seconds, micros = client.time()
        after = case.host.now()
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()
    there = datetime.fromtimestamp(int(seconds) + int(micros) / 1e6, UTC)
    return ((before - there) + (after - there)).total_seconds() / 2


_SHOWN = ("torch", "ray", "pyzmq", "grpcio")


def check_versions(case: DoctorCase) -> Iterator[Finding]:
    """Each package that is asked for, also those of extras that the configuration needs."""
    try:
        declared = metadata("twinpool")
    except PackageNotFoundError:
        yield fine("Twinpool runs from a folder of sources: versions aren't compared")
        return
    python = platform.python_version()
    wanted = str(declared["Requires-Python"] or "")
    if not SpecifierSet(wanted).contains(python, prereleases=True):
        yield error(
            f"Python {python}; supported is {wanted}", "install Twinpool into an environment with such a Python"
        )
    extras = _extras(case)
    seen = [f"Python {python}"]
    for text in declared.get_all("Requires-Dist") or ():
        asked = Requirement(text)
        if asked.marker is not None and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            there = case.host.version(asked.name)
        except PackageNotFoundError:
            yield error(f"{asked.name} isn't installed", f"pip install '{asked.name}{asked.specifier}'")
            continue
        if not asked.specifier.contains(there, prereleases=True):
            yield error(
                f"{asked.name} {there} is installed; supported is {asked.specifier}",
                f"pip install '{asked.name}{asked.specifier}'",
            )
        elif asked.name in _SHOWN:
            seen.append(f"{asked.name} {there}")
    yield fine(", ".join(seen))


def _extras(case: DoctorCase) -> list[str]:
    """The extras of the package that the configuration can't do without."""
    config = case.config
    redis = config.cache.storage.backend == "redis" or on_server(config.cluster.ledger) or config.cluster.ray_storage
    wanted = {"redis": bool(redis), "nixl": config.transfer.plane == "nixl", "cuda": case.wants_gpus}
    return [name for name, needed in wanted.items() if needed]
