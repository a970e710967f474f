"""The checks before anything is started: flags, configuration, checkpoint, port, memory.

Ray is never imported here, and torch only once the other checks have passed, so a mistake is refused within a second
and in one line.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from twinpool.cluster.assembly.node_shares import CardFacts, NodeFacts, NodeShare, apart, cards_of, measured
from twinpool.cluster.models import DEMO_NAME, read_model
from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.serve.security_check import check_security, with_absolute_paths
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.checkpoint.adapter_files import adapter_ref
from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf
from twinpool.contracts.checkpoint.model_spec import ModelSpec, served_as
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.config.cluster_config import Config, LaunchConfig, PoolsConfig, section_of, uneven
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.plane_choice import check_ranks_over_hosts, on_gpus, with_plane
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.tracing.otlp_exporter import check_tracing

if TYPE_CHECKING:
    from twinpool.cache.memory.kv_cache_spec import PoolSetSpec


log = logging.getLogger("twinpool.serve")


def adapters_of(config: Config) -> list[AdapterRef]:
    """The adapters of `adapters.load`, whose files are read. Raises `CheckpointError`."""
    adapters = config.adapters
    return [adapter_ref(name, path, adapters.allowed, adapters.max_rank) for name, path in adapters.configured.items()]


MAX_ROUTERS = 64


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `twinpool serve`, as given."""

    model: str = DEMO_NAME
    """What `find_model` takes."""
    prefill: int = 1
    decode: int = 1
    colocate: int = 0
    """Number of colocated workers; 0: two pools, of `prefill` and `decode` workers."""
    routers: int = 1
    """Number of routers, which share the port."""
    host: str = "127.0.0.1"
    port: int = 8000
    config: Path | None = None
    assignments: tuple[str, ...] = ()
    ray_address: str | None = None
    dashboard: bool = False
    verbose: bool = False
    """Whether to show the tables of the start, not their sum alone."""
    unsized: frozenset[Role] = frozenset()
    """Roles whose number of workers no flag gave: the configuration's `pools` goes before the number here."""
    unset: frozenset[str] = frozenset()
    """Further fields that no flag gave: the configuration's `launch` has them."""

    @classmethod
    def of_file(cls, config: Path) -> ServeOptions:
        """Return what the configuration's file alone asks for."""
        unset = frozenset(one.name for one in dataclasses.fields(LaunchConfig))
        return cls(config=config, unsized=frozenset((Role.PREFILL, Role.DECODE, Role.COLOCATED)), unset=unset)

    @property
    def file(self) -> str:
        """The configuration's file as an absolute path, by which `twinpool up` knows the run; empty without one."""
        return str(self.config.absolute()) if self.config is not None else ""

    @property
    def workers(self) -> dict[Role, int]:
        """Workers of each role that there is."""
        if self.colocate:
            return {Role.COLOCATED: self.colocate}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}

    @property
    def cache_role(self) -> Role:
        """A role by whose cache section pages are laid out; it is the same for all of them."""
        return next(iter(self.workers))


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What `serve` will start: checked, with every default worked out."""

    options: ServeOptions
    config: Config
    spec: ModelSpec
    pool_set: PoolSetSpec
    port: int
    shares: Mapping[str, NodeShare]
    """How each node is divided, by Ray node id; a single entry under the empty id where `serve` doesn't join a Ray.
    With `--ray-address` it is empty at first: nodes are added as they are measured."""
    weights: int = 0
    """Bytes of a worker's weights."""
    given: Config = field(default_factory=Config)
    """The configuration as it was given, with ``auto`` where it says so; `config` has what that came to."""
    source: str = ""
    """The name by which a node that lacks the checkpoint fetches it (`ModelSource.name`)."""

    @property
    def here(self) -> NodeShare:
        """The share of this machine. Only without `--ray-address`, when all workers run here."""
        return self.shares[""]

    def share_of(self, node_id: str) -> NodeShare:
        """The share of the node with this Ray id."""
        return self.shares.get(node_id) or self.here

    @property
    def wanted(self) -> dict[Role, int]:
        """Workers of each role."""
        return self.options.workers

    def divide(self, facts: NodeFacts) -> NodeShare:
        """Divide a node among the workers that it has places for. Raises `MemoryShort` and `ConfigError`."""
        from twinpool.cluster.serve.memory_fit import divide

        return divide(facts, self.config, self.pool_set, self.spec, self.weights, self.wanted)

    def cards_of(self, name: WorkerName, role: Role) -> tuple[int, ...]:
        """The cards of a worker's ranks, by rank; none where they run on the CPU, or Ray deals. A worker whose role was
        changed keeps its first."""
        dealt = self.shares[""].dealt.get(name, ()) if "" in self.shares else ()
        if not dealt:
            return ()
        there = [card.index for card in self.here.facts.cards]
        first = there.index(dealt[0])
        return tuple(there[(first + rank) % len(there)] for rank in range(self.config.ranks_for(role)))

    @property
    def workers(self) -> list[tuple[WorkerName, Role]]:
        """The workers that the cluster starts with."""
        from twinpool.cluster.serve.memory_fit import named

        return named(self.wanted)


def prepare(
    options: ServeOptions,
    free_bytes: int | None = None,
    cards: tuple[CardFacts, ...] | None = None,
    say: Callable[[str], None] = log.info,
    models: int = 1,
) -> ServePlan:
    """Check the options, fetch the model where it has to be, and work out what to start.

    `free_bytes` and `cards` are the memory and the GPUs to plan with; None: measure this machine's. `say` is told what
    is fetched. `models`: clusters that this machine's cores are divided among. Raises `ConfigError`, `CheckpointError`
    or `MemoryShort`, each in one line that says what to change. With `--ray-address`, memory is checked later, by node.
    """
    try:
        config = given = with_absolute_paths(load_config(options.config, options.assignments))
    except yaml.YAMLError as error:
        raise ConfigError(f"--set takes section.key=value with a YAML value: {' '.join(str(error).split())}") from None
    options = with_settings(options, config)
    config = given = dataclasses.replace(config, launch=_launch_of(options))
    check_flags(options)
    check_security(config.security, options.host, options.port, routers=options.routers)
    check_settings(config, options)
    if config.transfer.plane == "local":
        # Everything is in this process, and the next lines compute.
        processor.pin(config.engine.numerics_class)
    free_port(options.host, options.port)  # Before anything is fetched.
    found, read = read_model(options.model, config.engine, say)
    spec = served_as(read, config.router.served_model_name)
    for warning in spec.warnings:
        say(warning)
    if spec.pictures is not None and (why := config.no_images(spec.pictures.whole_positions)):
        say(f"images are refused: {why}")
    adapters_of(config)  # What isn't one is refused before anything starts.
    if options.ray_address is not None:
        cards = ()
    else:
        cards = cards_of(config.engine.device) if cards is None else cards
        if config.transfer.plane == "local":
            cards = cards[:1]  # Its copies reach the pools of one card alone.
        config = with_plane(on_device(config, bool(cards)), one_host=True, apart=apart(cards))
    pool_set = pool_set_of(spec, config, options.cache_role)
    check_ranks(config, spec, options.workers)
    for role, count in options.workers.items():
        if refusal := uneven(role, count, config.dp_for(role)):
            raise ConfigError(refusal)
    config = dataclasses.replace(config, decode=with_speculation(config, pool_set))
    weights = weight_bytes(spec, config)
    port = free_port(options.host, options.port)
    prepared = ServePlan(options, config, spec, pool_set, port, {}, weights, given, found.name)
    if options.ray_address is None:
        places = {role: count * config.ranks_for(role) for role, count in prepared.wanted.items()}
        facts = dataclasses.replace(measured(places), cards=cards)
        facts = dataclasses.replace(facts, cores=max(1, facts.cores // models))
        if free_bytes is not None:
            facts = dataclasses.replace(facts, free=free_bytes)
        prepared = dataclasses.replace(prepared, shares={"": prepared.divide(facts)})
        check_tiers(config, prepared.here)
    return prepared


def plan_again(
    options: ServeOptions,
    spec: ModelSpec,
    given: Config,
    port: int,
    nodes: Mapping[str, NodeFacts],
    *,
    device: str,
    plane: str,
    source: str,
) -> ServePlan:
    """The plan of a cluster that runs, worked out again: by what it was `given`, by what its `nodes` had before it ran,
    and by the `device` and `plane` that were chosen then; ``auto`` where that is still to come, when nodes join. Raises
    as `prepare` does."""
    config = dataclasses.replace(
        given,
        engine=dataclasses.replace(given.engine, device=device),
        transfer=dataclasses.replace(given.transfer, plane=plane),  # type: ignore[arg-type]  # A choice of `with_plane`.
    )
    if device != "auto":
        config = on_device(config, device != "cpu")
    pool_set = pool_set_of(spec, config, options.cache_role)
    config = dataclasses.replace(config, decode=with_speculation(config, pool_set))
    plan = ServePlan(options, config, spec, pool_set, port, {}, weight_bytes(spec, config), given, source)
    return dataclasses.replace(plan, shares={node: plan.divide(facts) for node, facts in nodes.items()})


def on_device(config: Config, cards: bool) -> Config:
    """`config` with ``auto`` of `engine.device` made cuda, where there are `cards`, or cpu. Raises `ConfigError` where
    something needs a GPU then."""
    device = config.engine.device
    chosen = device if device != "auto" else "cuda" if cards else "cpu"
    if chosen == "cpu" and config.engine.graphs == "on":
        raise ConfigError("engine.graphs=on needs a GPU, and the workers run on the CPU: set engine.graphs=auto")
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, device=chosen))


def check_tiers(config: Config, share: NodeShare) -> None:
    """Check that some worker has the host memory that pages go through to storage. Raises `ConfigError`."""
    if config.cache.storage.backend != "none" and not any(share.host_bytes.values()):
        raise ConfigError(
            f"cache.storage.backend={config.cache.storage.backend} needs host memory to read into and write from, and "
            "the budget leaves none: set cache.host_bytes, or cluster.host_memory_bytes"
        )


def pool_set_of(spec: ModelSpec, config: Config, role: Role = Role.PREFILL) -> PoolSetSpec:
    """The pools that a checkpoint's model needs in workers of `role`.

    Raises `CheckpointError` for a model that isn't supported.
    """
    from twinpool.cluster.assembly.memory_plan import state_options
    from twinpool.engine.models.registry import model_for

    return model_for(spec, config.engine).pool_set(state_options(spec, config, role))


def with_speculation(config: Config, pool_set: PoolSetSpec) -> DecodeConfig:
    from twinpool.decode.drafting import with_speculation

    return with_speculation(config.decode, pool_set)


def check_ranks(config: Config, spec: ModelSpec, roles: Iterable[Role] = PAIR) -> None:
    """Check that the model can be divided into the configured numbers of ranks. Raises `ConfigError` naming numbers
    that would work."""
    for role in roles:
        _check_data_parallel(config, spec, role)
        _check_stages(config, spec, role)
        size, key = config.tp_for(role), f"{section_of(role)}.tp"
        ep, ep_key = config.ep_for(role), f"{section_of(role)}.ep"
        if ep not in (1, size):
            also = f"; with {ep_key}={ep}, {key} has to be {ep}, too" if size == 1 else ""
            raise ConfigError(f"{ep_key}={ep} must be 1 or {key}, which is {size}{also}")
        if size == 1:
            continue
        if config.transfer.plane == "local":
            raise ConfigError(f"{key}={size} needs a process for each rank: use transfer.plane=shm, nixl or zmq")
        reason = divides(config, spec, size, ep)
        if not reason:
            continue
        if ep > 1 and not divides(config, spec, size):
            raise ConfigError(f"{ep_key}={ep}: {reason}; it can be 1")
        good = [str(n) for n in range(1, 17) if not divides(config, spec, n, n if ep > 1 else 1)]
        raise ConfigError(f"{key}={size}: {reason}; {key} can be {', '.join(good)}")


def _check_data_parallel(config: Config, spec: ModelSpec, role: Role) -> None:
    """Check that the model's experts can be spread over the configured number of workers. Raises `ConfigError` naming
    numbers that would work."""
    size, key = config.dp_for(role), f"{section_of(role)}.dp"
    if size == 1:
        return
    for other, count in (("ep", config.ep_for(role)), ("pp", config.pp_for(role))):
        if count > 1:
            raise ConfigError(
                f"{key}={size} and {section_of(role)}.{other}={count}: the ranks of workers that share their experts "
                "divide each expert, and have all layers; set one of them to 1"
            )
    barred = {
        "transfer.plane=local": config.transfer.plane == "local",
        f"engine.device={config.engine.device}": on_gpus(config),
        "engine.models=transformers": config.engine.models != "native",
        "engine.share_weights=on": config.engine.share_weights == "on",
    }
    for setting in [setting for setting, there in barred.items() if there]:
        raise ConfigError(f"{key}={size} doesn't go with {setting} yet: leave one of them out")
    if config.autoscaling.enabled:
        bounds = config.autoscaling.bounds(role)
        for name, count in (("min", bounds.min_workers), ("max", bounds.max_workers)):
            if refusal := uneven(role, count, size):
                raise ConfigError(f"autoscaling.{role}.{name}_workers: {refusal}")
    ranks = config.tp_for(role)
    reason = divides(config, spec, ranks, dp=size)
    if reason == NO_EXPERTS:
        raise ConfigError(f"{key}={size}: {reason}; dp of a dense model is more workers: set {key}=1")
    if reason:
        good = [str(n) for n in range(1, MOST_DP + 1) if not divides(config, spec, ranks, dp=n)]
        raise ConfigError(f"{key}={size}: {reason}; {key} can be {', '.join(good)}")


NO_EXPERTS = "this model has no experts"
MOST_DP = 64
"""Most data-parallel ranks that an error suggests."""
MOST_STAGES = 64
"""Most stages that an error suggests."""


def _check_stages(config: Config, spec: ModelSpec, role: Role) -> None:
    """Check that the model's layers can be divided into the configured number of stages. Raises `ConfigError` naming
    numbers that would work."""
    stages, key = config.pp_for(role), f"{section_of(role)}.pp"
    if stages == 1:
        return
    if config.tp_for(role) > 1:
        raise ConfigError(
            f"{key}={stages} and {section_of(role)}.tp={config.tp_for(role)}: ranks of a stage that divide its heads "
            "aren't there yet; set one of them to 1"
        )
    if config.transfer.plane == "local":
        raise ConfigError(f"{key}={stages} needs a process for each rank: use transfer.plane=shm, nixl or zmq")
    reason = divides(config, spec, stages, stages=stages)
    if reason:
        most = min(spec.layers, MOST_STAGES)
        good = [str(n) for n in range(1, most + 1) if n == 1 or not divides(config, spec, n, stages=n)]
        raise ConfigError(f"{key}={stages}: {reason}; {key} can be {', '.join(good)}")


def divides(config: Config, spec: ModelSpec, size: int, ep: int = 1, stages: int = 1, dp: int = 1) -> str:
    """Why the model can't be divided among `size` ranks, in `stages` and with experts spread over `ep`, or over `dp`
    workers, in words; empty where it can."""
    from twinpool.cluster.assembly.memory_plan import state_options
    from twinpool.engine.models.registry import model_for
    from twinpool.engine.runner.kernel_choice import dtype_for
    from twinpool.engine.tensors.shard import Shard
    from twinpool.engine.tensors.weight_loader import Weights

    model = model_for(spec, config.engine)
    dtype, options = dtype_for(spec, config.engine), state_options(spec, config, Role.PREFILL)
    try:
        for rank in range(size) if stages > 1 else (0, size - 1):
            shard = dataclasses.replace(Shard.of(rank, size, ep, stages), dp=dp)
            mine = model.pool_set(dataclasses.replace(options, shard=shard))
            if mine != mine.whole.shard(rank, size, stages):
                return "its state is not divided like its heads"
            weights = Weights.dry(spec, dtype, shard)
            model.build_dry(weights)
            if max(ep, dp) > 1 and not weights.mixtures:
                return NO_EXPERTS
    except ConfigError as error:
        return str(error)
    return ""


def weight_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes of one worker's weights as it keeps them (`engine.weights`), counted from the headers. Raises `ConfigError`
    where `engine.activations` can't be had with them."""
    from twinpool.engine.models.registry import unchecked_model
    from twinpool.engine.runner.kernel_choice import check_inputs, dtype_for, inputs_of, weights_kept
    from twinpool.engine.tensors.weight_loader import Weights

    gpu = on_gpus(config)
    keep = weights_kept(config.engine, gpu=gpu, gguf=is_gguf(spec.path))
    inputs = inputs_of(config.engine, spec.quantization, gpu=gpu)
    weights = Weights.dry(spec, dtype_for(spec, config.engine), keep=keep, inputs=inputs, gpu=gpu)
    unchecked_model(spec, config.engine).build_dry(weights)
    check_inputs(config.engine, weights.linears, spec.name)
    return weights.nbytes


def with_settings(options: ServeOptions, config: Config) -> ServeOptions:
    """The options with what the configuration says where no flag does."""
    return _sized(_launched(options, config.launch), config.pools)


def _sized(options: ServeOptions, pools: PoolsConfig) -> ServeOptions:
    """The options with the sizes of `pools` where no flag gave one."""
    unsized = options.unsized
    return dataclasses.replace(
        options,
        prefill=(Role.PREFILL in unsized and pools.prefill) or options.prefill,
        decode=(Role.DECODE in unsized and pools.decode) or options.decode,
        colocate=(Role.COLOCATED in unsized and pools.colocated) or options.colocate,
    )


def _launched(options: ServeOptions, launch: LaunchConfig) -> ServeOptions:
    """Fill in what no flag gave."""
    found = {name: getattr(launch, name) for name in options.unset}
    if found.get("ray_address") == "":
        found["ray_address"] = None
    return dataclasses.replace(options, **found)


def _launch_of(options: ServeOptions) -> LaunchConfig:
    """What the cluster is launched with, flags included: a file that is applied to it later may say the same."""
    found = {one.name: getattr(options, one.name) for one in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**found | {"ray_address": options.ray_address or ""})


def check_flags(options: ServeOptions) -> None:
    """Check numbers of workers and routers, and the port. Raises `ConfigError`."""
    if options.colocate < 0:
        raise ConfigError(f"--colocate must be at least 1, got {options.colocate}")
    if options.colocate and (options.prefill, options.decode) != (1, 1):
        raise ConfigError(
            "--colocate goes without --prefill and --decode: colocated workers have both roles, and a cluster has "
            "either them or two pools"
        )
    for flag, count in (("--prefill", options.prefill), ("--decode", options.decode)):
        if count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}: each role needs a worker")
    if not 1 <= options.routers <= MAX_ROUTERS:
        raise ConfigError(f"--routers must be between 1 and {MAX_ROUTERS}, got {options.routers}")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {options.port}")


def _check_pools(autoscaling: AutoscalingConfig, plane: str, options: ServeOptions) -> None:
    """Check that the autoscaler, if there is one, has two pools of processes, within its bounds. Raises
    `ConfigError`."""
    if not autoscaling.enabled:
        return
    if plane == "local":
        raise ConfigError("autoscaling.enabled needs workers that are processes: leave out transfer.plane=local")
    if options.colocate:
        raise ConfigError("autoscaling.enabled is for pools of prefill and decode workers: leave out --colocate")
    for role, count in options.workers.items():
        bounds = autoscaling.bounds(role)
        if not bounds.min_workers <= count <= bounds.max_workers:
            raise ConfigError(
                f"--{role} {count} is outside autoscaling.{role}.min_workers={bounds.min_workers} and "
                f"max_workers={bounds.max_workers}"
            )
    if sum(options.workers.values()) > autoscaling.max_together:
        raise ConfigError(
            f"--prefill {options.prefill} and --decode {options.decode} are more than "
            f"autoscaling.max_workers={autoscaling.max_workers} together"
        )


def check_settings(config: Config, options: ServeOptions) -> None:
    """Check what the configuration and the flags say together. Raises `ConfigError`."""
    check_tracing(config.tracing)
    if config.transfer.plane == "local" and options.routers > 1:
        raise ConfigError("transfer.plane=local runs everything in one process: leave out --routers or the plane")
    if config.transfer.plane == "local" and options.ray_address is not None:
        raise ConfigError("transfer.plane=local runs everything in one process: leave out --ray-address or the plane")
    if config.transfer.plane == "local" and config.engine.share_weights == "on":
        raise ConfigError("engine.share_weights=on is for workers that are processes: leave it out, or the plane")
    if ":" in config.engine.device and options.ray_address is not None:
        raise ConfigError(f"engine.device={config.engine.device}: with --ray-address Ray deals GPUs out; use cuda")
    _check_pools(config.autoscaling, config.transfer.plane, options)
    check_ranks_over_hosts(config, options.workers, joined=options.ray_address is not None)
    pages = {role: config.cache_for(role).page_tokens for role in options.workers}
    if len(set(pages.values())) > 1:
        raise ConfigError(
            f"prefill.cache.page_tokens is {pages[Role.PREFILL]} and decode.cache.page_tokens is "
            f"{pages[Role.DECODE]}: pages are handed over as they are, so both must be equal"
        )
