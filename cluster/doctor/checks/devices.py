"""GPUs and the network's cards: what the drivers say, against what was built and what is planned."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, sized, warning
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
