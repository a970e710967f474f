"""Memory of this machine: whether the planned pools and host tiers fit, shared memory, swap and overcommit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from twinpool.cluster.assembly.device_cards import apart
from twinpool.cluster.assembly.node_shares import NodeFacts, cores, free_bytes, measured
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, sized, warning
from twinpool.cluster.ray_nodes.ray_cluster import OBJECT_STORE_BYTES
from twinpool.cluster.serve.preflight import ServePlan, check_ranks, check_tiers, on_device, plan_again
from twinpool.contracts.config.plane_choice import with_plane
from twinpool.contracts.errors import TwinpoolError

SWAPPED_SHARE = 0.1
"""The part of swap in use beyond which this machine is short of memory already."""


def check_memory(case: DoctorCase) -> Iterator[Finding]:
    """Pools, weights and host tiers against what is free, as `serve` divides it."""
    spec = case.model.spec
    if spec is None or case.refused is not None:
        yield fine("not looked at: it goes by the model and the configuration, of which one can't be read yet")
        return
    try:
        config = with_plane(on_device(case.config, bool(case.cards)), one_host=True, apart=apart(case.cards))
        check_ranks(config, spec, case.options.workers)
        if case.options.ray_address is not None:
            yield fine("the model's heads can be divided so; each node's memory is measured when it is joined")
            return
        plan = plan_again(
            case.options, spec, case.config, case.options.port, {"": _facts(case)},
            device=config.engine.device, plane=config.transfer.plane, source="",
        )  # fmt: skip
        check_tiers(plan.config, plan.here)
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    need, tiers = _need(plan), sum(plan.here.host_bytes[role] * count for role, count in plan.wanted.items())
    yield fine(f"about {sized(need)} needed, {sized(tiers)} of it host tiers; {sized(plan.here.facts.free)} free")
    yield from _overcommit(case, need)


def _facts(case: DoctorCase) -> NodeFacts:
    places = {role: count * case.config.tp_for(role) for role, count in case.options.workers.items()}
    group = case.host.cgroup
    return dataclasses.replace(measured(places), cards=case.cards, free=free_bytes(group), cores=cores(group))


def _need(plan: ServePlan) -> int:
    """Bytes of this machine's memory that all workers take at most, host tiers filled."""
    from twinpool.cluster.serve.memory_fit import max_bytes, shared_weights  # It imports torch.

    here, config = plan.here, plan.config
    each = sum(max_bytes(here, config, role) * count for role, count in plan.wanted.items())
    return each + shared_weights(here, config)


def _overcommit(case: DoctorCase, need: int) -> Iterator[Finding]:
    """Under strict overcommit memory is refused that is promised, whether or not it is used."""
    if case.host.read(case.host.proc / "sys/vm/overcommit_memory") != "2":
        return
    meminfo = _meminfo(case)
    left = meminfo.get("CommitLimit", 0) - meminfo.get("Committed_AS", 0)
    if left < need:
        yield error(
            f"vm.overcommit_memory=2 leaves {sized(max(0, left))} to promise, and pools and host tiers map "
            f"{sized(need)}",
            "sysctl vm.overcommit_memory=0, or a smaller cluster.host_memory_bytes",
        )


def check_swap(case: DoctorCase) -> Iterator[Finding]:
    """Swap in use: pages of a pool that are written out make a step wait for a disk."""
    meminfo = _meminfo(case)
    total, used = meminfo.get("SwapTotal", 0), meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    if total and used > SWAPPED_SHARE * total:
        yield warning(
            f"{sized(used)} of {sized(total)} swap are in use: this machine is short of memory already",
            "end what takes it, or swapoff -a",
            "a step that touches a swapped page waits for the disk, and so do all its streams",
        )
    else:
        yield fine(f"swap: {sized(used)} of {sized(total)} in use" if total else "no swap")


def check_shared_memory(case: DoctorCase) -> Iterator[Finding]:
    """`/dev/shm`, where a Ray of our own has its object store. Host tiers lie in memory without a name, not there."""
    if case.options.ray_address is not None or case.config.transfer.plane == "local":
        yield fine("no Ray of our own is started here, and nothing else lies in /dev/shm")
        return
    try:
        room = os.statvfs(case.host.shm)
    except OSError as problem:
        yield error(f"{case.host.shm}: {problem.strerror}", "mount a tmpfs there (docker run --shm-size=1g)")
        return
    free = room.f_bavail * room.f_frsize
    if free < OBJECT_STORE_BYTES:
        yield warning(
            f"{case.host.shm} has {sized(free)} free; Ray's object store takes {sized(OBJECT_STORE_BYTES)}",
            "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
            "Ray puts its store on a disk then, and starts slowly; host tiers and pools don't lie there",
        )
    else:
        yield fine(f"{case.host.shm}: {sized(free)} free")


def _meminfo(case: DoctorCase) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    found = {}
    for line in case.host.read(case.host.proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0]) * 1024
    return found
