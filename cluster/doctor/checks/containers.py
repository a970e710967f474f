"""What containers forbid, and workers need: tried for real with a child process."""

from __future__ import annotations

import os
import select
import subprocess
from array import array
from collections.abc import Iterator

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, warning
from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.python_command import script_command

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
