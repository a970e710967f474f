"""Checks of what this machine computes with.

- GPUs and the network's cards: what the drivers say, against what was built and what is planned.
- Memory: whether the planned pools and host tiers fit, shared memory, swap and overcommit.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

from twinpool.cluster.assembly.node_shares import NodeFacts, apart, cores, free_bytes, measured
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, error, fine, from_refusal, sized, warning
from twinpool.cluster.ray_nodes.ray_cluster import OBJECT_STORE_BYTES
from twinpool.cluster.serve.preflight import ServePlan, check_ranks, check_tiers, on_device, plan_again
from twinpool.contracts.config.plane_choice import with_plane
from twinpool.contracts.errors import TwinpoolError

ASK_S = 10.0
MIN_CAPABILITY = 70
"""Ten times the compute capability below which Triton compiles nothing."""
FREE_SHARE = 0.9
"""The part of a card's memory that is free where nobody else computes there."""
_NIXL = ("nixl", "nixl_cu12", "nixl_cu13")


def check_gpus(case: DoctorCase) -> Iterator[Finding]:
    """The driver, torch's build, and each card that workers would have."""
    driver = case.host.read(case.host.proc / "driver/nvidia/version")
    setting = case.config.engine.device
    if setting == "cpu" or case.options.ray_address is not None:
        yield fine(
            "not looked at: engine.device=cpu" if setting == "cpu" else "each node's GPUs are looked at when joined"
        )
        return
    try:
        build = case.host.version("torch")
    except PackageNotFoundError:
        yield fine("torch isn't installed")
        return
    if driver and build.endswith("+cpu"):
        yield warning(
            f"this machine has an NVIDIA driver, and torch {build} is built without CUDA: workers compute on the CPU",
            "install a torch with CUDA (docs/gpu.md), or set engine.device=cpu to say that it is meant",
        )
        return
    try:
        cards = case.cards
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    if not cards:
        yield fine(f"no GPU: workers compute on the CPU (torch {build})")
        return
    wrong = False
    for finding in (*_cards(case), *_driver()):
        wrong = True
        yield finding
    if not wrong:
        yield fine(", ".join(f"cuda:{card.index} {card.name}, {sized(card.free)} free" for card in cards))


def _cards(case: DoctorCase) -> Iterator[Finding]:
    for card in case.cards:
        name = f"cuda:{card.index} ({card.name})"
        if card.capability < MIN_CAPABILITY:
            yield error(
                f"{name} has compute capability {card.capability / 10}", "use engine.device=cpu, or a newer card"
            )
        if card.free < FREE_SHARE * card.total:
            yield warning(
                f"{name} has {sized(card.free)} of {sized(card.total)} free: others compute there",
                "end them, or use another card (engine.device=cuda:N); pools get what is free at the start",
            )


def _driver() -> Iterator[Finding]:
    """What nvidia-smi says: the CUDA that the driver can run, and persistence."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    try:
        said = subprocess.run(
            [tool, "-q", "-d", "PERFORMANCE"], capture_output=True, text=True, timeout=ASK_S, check=False
        )
        modes = subprocess.run(
            [tool, "--query-gpu=persistence_mode", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield warning(
            f"nvidia-smi doesn't answer: {problem}", "look at dmesg: a driver that hangs takes workers with it"
        )
        return
    runs = re.search(r"CUDA Version\s*:\s*(\d+)\.(\d+)", said.stdout)
    import torch

    built = str(torch.version.cuda or "")
    if runs is not None and built and int(built.split(".", maxsplit=1)[0]) > int(runs[1]):
        yield error(
            f"torch is built for CUDA {built}, and the driver runs {runs[1]}.{runs[2]} at most",
            "install a newer driver, or a torch for the older CUDA",
        )
    if "Disabled" in modes.stdout:
        yield warning(
            "persistence mode is off: the driver is unloaded when no process has a card open, and workers start slowly",
            "nvidia-smi -pm 1, or run nvidia-persistenced",
        )


def check_rdma(case: DoctorCase) -> Iterator[Finding]:
    """Cards for RDMA and NIXL's library, where the plane is nixl."""
    if case.config.transfer.plane != "nixl":
        yield fine(f"not needed: transfer.plane={case.config.transfer.plane}")
        return
    wrong = False
    if not any(find_spec(name) for name in _NIXL):
        wrong = True
        yield error("transfer.plane=nixl, and NIXL isn't installed", "pip install 'twinpool[nixl]'")
    ports = {
        f"{state.parents[2].name}/{state.parent.name}": case.host.read(state)
        for state in sorted(case.host.sys.glob("class/infiniband/*/ports/*/state"))
    }
    active = [name for name, state in ports.items() if "ACTIVE" in state]
    for name, state in ports.items():
        if name not in active:
            wrong = True
            yield warning(f"RDMA port {name} is {state or 'unreadable'}", "look at its cable and its subnet manager")
    if case.several_hosts and not active:
        wrong = True
        yield warning(
            "no RDMA port is active here: UCX sends over TCP",
            "transfer.plane=staged is the plane for that, and encrypts",
        )
    if not wrong:
        yield fine(f"NIXL is installed; active RDMA ports: {', '.join(active) or 'none, and all is on this host'}")


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
    places = {role: count * case.config.ranks_for(role) for role, count in case.options.workers.items()}
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
