"""Limits on what this user's processes may have: descriptors, processes, locked memory, a control group's share."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from twinpool.cluster.assembly.node_shares import cores
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, sized, warning
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
