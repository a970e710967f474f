"""Everything that can be refused before anything is started: flags, configuration, checkpoint, port, memory.

Ray is never imported here, and torch only once the rest has passed, so a mistake costs its author a second and one
line.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from contracts.config import Config, load_config
from contracts.errors import ConfigError, TwinpoolError
from contracts.ids import Role, WorkerName
from contracts.model import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from cache.registry import PoolSetSpec
    from cluster.memory import MemoryPlan

DEMO = Path(__file__).parent / "demo"


class MemoryShort(TwinpoolError):
    """Raised when weights and pools can't fit into the memory that is free."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `twinpool serve`, as given."""

    model: str = "demo"
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    config: Path | None = None
    assignments: tuple[str, ...] = ()
    ray_address: str | None = None
    dashboard: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """What will be started: checked, with every default worked out."""

    options: ServeOptions
    config: Config
    spec: ModelSpec
    pool_set: PoolSetSpec
    port: int
    threads: int
    plans: dict[Role, MemoryPlan] = field(default_factory=dict)
    """What the pools of each role's workers hold."""
    weights: int = 0
    """Bytes of a worker's weights."""

    @property
    def workers(self) -> list[tuple[WorkerName, Role]]:
        counts = ((Role.PREFILL, self.options.prefill), (Role.DECODE, self.options.decode))
        return [(WorkerName(f"{role}-{i}"), role) for role, count in counts for i in range(count)]


def prepare(options: ServeOptions, free_bytes: int | None = None) -> Prepared:
    """Check the options and work out what to start.

    `free_bytes` is the memory to plan with; None asks the machine. Raises `ConfigError`, `CheckpointError` or
    `MemoryShort`, each in one line that says what to change.
    """
    _check_flags(options)
    try:
        config = load_config(options.config, options.assignments)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set takes section.key=value with a YAML value: {' '.join(str(error).split())}") from None
    _check_config(config, options)
    spec = read_model_spec(model_folder(options.model))
    pool_set = pool_set_of(spec, config)
    check_ranks(config, spec)
    processes = options.prefill * config.prefill.tp + options.decode * config.decode.tp
    free = free_bytes if free_bytes is not None else _free_bytes()
    threads = config.engine.threads or max(1, _cores() // processes)
    weights = weight_bytes(spec, config)
    plans = _plans(options, config, spec, pool_set, weights, free)
    return Prepared(options, config, spec, pool_set, free_port(options.host, options.port), threads, plans, weights)


def _plans(
    options: ServeOptions, config: Config, spec: ModelSpec, pool_set: PoolSetSpec, weights: int, free: int
) -> dict[Role, MemoryPlan]:
    """What each role's workers hold. Raises `MemoryShort`; nodes of a running cluster have memory of their own."""
    from cluster.fitting import Demand

    here = options.ray_address is None
    demand = Demand(config, pool_set, spec.context, weights if here else 0, options.prefill, options.decode, free)
    plans = demand.plans()
    if plans is None or (here and demand.need(plans) > free):
        raise MemoryShort(demand.refusal(plans))
    return plans


def model_folder(model: str) -> Path:
    """The checkpoint's folder; ``demo`` is the one that comes with Twinpool, unless there is a folder of that name."""
    if model == "demo" and not Path("demo/config.json").exists():
        return DEMO
    return Path(model).expanduser().absolute()


def pool_set_of(spec: ModelSpec, config: Config) -> PoolSetSpec:
    """The state that a checkpoint's model keeps. Raises `CheckpointError` for one that it can't be."""
    from cluster.memory import state_options
    from engine import model_for

    return model_for(spec).pool_set(state_options(spec, config, Role.PREFILL))


def check_ranks(config: Config, spec: ModelSpec) -> None:
    """Whether the model can be divided as the configuration says. Raises `ConfigError` naming what would work."""
    for role in Role:
        size = config.tp_for(role)
        if size == 1:
            continue
        if config.transfer.plane == "local":
            raise ConfigError(f"{role}.tp={size} needs a process for each rank: use transfer.plane=shm or zmq")
        reason = _divides(config, spec, size)
        if reason:
            good = [str(n) for n in range(1, 17) if not _divides(config, spec, n)]
            raise ConfigError(f"{role}.tp={size}: {reason}; {role}.tp can be {', '.join(good)}")


def _divides(config: Config, spec: ModelSpec, size: int) -> str:
    """Why the model can't be divided among so many ranks; empty where it can."""
    from cluster.memory import state_options
    from engine import dtype_for, model_for
    from engine.shard import Shard
    from engine.weights import Weights

    model = model_for(spec)
    dtype, options = dtype_for(spec, config.engine), state_options(spec, config, Role.PREFILL)
    try:
        for rank in (0, size - 1):
            shard = Shard(rank, size)
            mine = model.pool_set(dataclasses.replace(options, shard=shard))
            if mine != mine.whole.shard(rank, size):
                return "its state is not divided like its heads"
            model.build(Weights.dry(spec, dtype, shard))
    except ConfigError as error:
        return str(error)
    return ""


def weight_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes of a checkpoint's weights in the dtype to compute in, whatever they have on disk."""
    from engine import dtype_for

    stored = sum(path.stat().st_size for path in spec.folder.glob("*.safetensors"))
    return stored * dtype_for(spec, config.engine).itemsize // (4 if spec.dtype == "float32" else 2)


def with_threads(config: Config, threads: int) -> Config:
    """The configuration of one worker, whose threads have been worked out."""
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, threads=threads))


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `ConfigError` when it is taken or the host is not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} can't be resolved: {error.strerror}") from None
    except OSError as error:
        if port:
            raise ConfigError(
                f"can't listen on {host}:{port} ({error.strerror}); choose another --port, or 0 for any"
            ) from None
        raise ConfigError(f"can't listen on --host {host} ({error.strerror})") from None


def _check_flags(options: ServeOptions) -> None:
    for flag, count in (("--prefill", options.prefill), ("--decode", options.decode)):
        if count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}: each role needs a worker")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {options.port}")


def _check_config(config: Config, options: ServeOptions) -> None:
    if config.transfer.plane == "local" and options.ray_address is not None:
        raise ConfigError("transfer.plane=local runs everything in one process: leave out --ray-address or the plane")
    if config.engine.device == "cuda":
        raise ConfigError("engine.device=cuda: data planes register host memory only as yet; use engine.device=cpu")
    pages = {role: config.cache_for(role).page_tokens for role in Role}
    if len(set(pages.values())) > 1:
        raise ConfigError(
            f"prefill.cache.page_tokens is {pages[Role.PREFILL]} and decode.cache.page_tokens is "
            f"{pages[Role.DECODE]}: pages are handed over as they are, so both must be equal"
        )


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
