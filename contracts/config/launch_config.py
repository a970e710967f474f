"""The configuration section of a launch: what `twinpool serve` takes as flags, for files that say all of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What a cluster is launched with, where no flag says otherwise. None of it can be changed while it runs."""

    model: str = "demo"
    """What `--model` takes: a checkpoint folder, a GGUF file, a name on the Hugging Face Hub (org/name[@revision]),
    smollm2, or demo."""
    routers: int = 1
    """Number of routers, which share the port."""
    host: str = "127.0.0.1"
    """Address that the router listens on."""
    port: int = 8000
    """Port that the router listens on; 0 for any."""
    ray_address: str = ""
    """The Ray cluster to join (auto: the one on this machine); empty: a Ray of its own."""
    dashboard: bool = False
    """Start Ray's dashboard too."""
