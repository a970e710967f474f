"""`twinpool plan --measure`: the costs of a cluster's steps, measured and fitted."""

from __future__ import annotations

import asyncio
import os
import platform
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from twinpool.cli.admin_client import AdminClient
from twinpool.cli.own_cluster import own_cluster
from twinpool.cli.plan.probe_cluster import ClusterProbes, find_endpoint
from twinpool.cli.replay.replay_command import KEY_VARIABLE
from twinpool.cli.replay.trace_prompts import Content
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import Role
from twinpool.sim.scale.measured_costs import BatchProbe, MeasuredCosts, PromptProbe, fit_costs


@dataclass(frozen=True, slots=True)
class CostSource:
    """What is measured."""

    url: str = ""
    """A cluster that runs; empty: one is started."""
    model: str = "demo"
    config: Path | None = None
    assignments: tuple[str, ...] = ()
    token_range: tuple[int, int] = (300, 2000)

    def serve_flags(self) -> list[str]:
        flags = ["--model", self.model]
        if self.config is not None:
            flags += ["--config", str(self.config)]
        return flags + [part for setting in self.assignments for part in ("--set", setting)]


@dataclass(frozen=True, slots=True)
class _PoolSizes:
    prefill_tokens: int
    decode_tokens: int
    position_bytes: int


def measure_costs(source: CostSource, say: Callable[[str], None]) -> MeasuredCosts:
    """Measure; `say` is told what was seen. Raises `ConfigError` for what can't be started, and `TwinpoolError` where
    requests fail."""
    with ExitStack() as stack:
        if source.url:
            config, url = load_config(source.config, source.assignments), source.url
            sizes = _told(url, config)
        else:
            config, sizes = _planned(source, say)
            say("starting a worker of each role")
            url = stack.enter_context(own_cluster(source.serve_flags()))
        model, prompts, batches = asyncio.run(_probed(url, source, config.prefill.chunk_tokens, say))
    drafts = 0 if config.decode.speculation == "off" else config.decode.draft_requests
    fit = fit_costs(prompts, batches, config.prefill.chunk_tokens, drafts)
    return MeasuredCosts(
        model=model,
        machine=f"{platform.node()}, {os.cpu_count()} cores",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        costs=fit.costs,
        chunk_tokens=config.prefill.chunk_tokens,
        page_tokens=config.cache.page_tokens,
        max_rows=config.decode.max_batch_tokens,
        prefill_tokens=sizes.prefill_tokens,
        decode_tokens=sizes.decode_tokens,
        position_bytes=sizes.position_bytes,
        prompt_error=fit.prompt_error,
        batch_error=fit.batch_error,
        prompts=tuple(prompts),
        batches=tuple(batches),
    )


async def _probed(
    url: str, source: CostSource, chunk_tokens: int, say: Callable[[str], None]
) -> tuple[str, Sequence[PromptProbe], Sequence[BatchProbe]]:
    endpoint, model, context = await find_endpoint(url, os.environ.get(KEY_VARIABLE, ""))
    content = Content(random.SystemRandom().randrange(1, 1 << 30), *source.token_range)
    probes = ClusterProbes(endpoint, model, context, content, say, chunk_tokens)
    return model, await probes.prompts(), await probes.batches()


def _planned(source: CostSource, say: Callable[[str], None]) -> tuple[Config, _PoolSizes]:
    """What a cluster of one worker each would be, checked before it is started."""
    from twinpool.cache.memory.kv_cache_spec import PoolKind
    from twinpool.cluster.assembly.memory_plan import unit_bytes
    from twinpool.cluster.serve.preflight import ServeOptions, prepare

    plan = prepare(ServeOptions(source.model, port=0, config=source.config, assignments=source.assignments), say=say)
    units = unit_bytes(plan.pool_set, 1)
    full = sum(units[pool.name] for pool in plan.pool_set.pools if pool.kind is PoolKind.FULL)
    plans = plan.here.plans
    return plan.config, _PoolSizes(
        plans[Role.PREFILL].positions, plans[Role.DECODE].positions, full // plan.config.cache.page_tokens
    )


def _told(url: str, config: Config) -> _PoolSizes:
    """What a running cluster tells operators of its pools; without their key, large ones are assumed."""
    pages = {"prefill": 0, "decode": 0}
    try:
        for worker in AdminClient.at(url).status()["workers"]:
            if worker["role"] in pages:
                pages[worker["role"]] = int(worker["pages_total"])
    except (TwinpoolError, LookupError, TypeError, ValueError):
        pages = {"prefill": 0, "decode": 0}
    size = config.cache.page_tokens
    return _PoolSizes(pages["prefill"] * size or 1 << 19, pages["decode"] * size or 1 << 19, 0)
