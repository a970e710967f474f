"""What the figures of a bench were measured on, for its JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, object]:
    """Processor, usable cores, versions, torch's threads and the load of the last minute: not idle means noisy."""
    import torch  # Stand-ins for workers, which import this file as well, need none.

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def headline() -> str:
    """The same in one line."""
    about = describe()
    return (
        f"{about['processor']}, {about['cores']} cores, load {about['load_1min']:.1f}; "
        f"torch {about['torch']}, {about['threads']} threads"
    )
