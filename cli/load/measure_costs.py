"""`twinpool plan --measure`: the costs of a cluster's steps, measured and fitted.

The cluster serves nobody else. Probes are prompts one at a time, and batches of answers, as a client sees them, so the
costs have everything in them that a request meets: the router, the messages, the hand-over.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twinpool.cli.admin_client import AdminClient
from twinpool.cli.launch_commands import own_cluster
from twinpool.cli.load.open_loop import Content
from twinpool.cli.load.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.load.replay_command import KEY_VARIABLE
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import Role
from twinpool.sim.scale.cluster_plan import BatchProbe, MeasuredCosts, PromptProbe, fit_costs

TIMEOUT_S = 120.0
REPEATS = 5
PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of prompts, as far as the context reaches."""
TOGETHER = (2, 4, 8)
"""Prompts that come at once."""
ROWS = (1, 2, 4, 8, 16, 32)
ANSWER_TOKENS = (48, 256)
"""Tokens of the answers of a batch, at least and at most: as many as take `BATCH_S`."""
BATCH_S = 6.0
MIN_EVENTS = 16
"""Tokens that each answer of a batch must have had beside all others, to be counted."""
WAKE_S = 600.0
"""Seconds that a cluster may take to fall asleep, or to wake."""
LOOK_S = 0.05
_LAST = 8
"""Tokens at a prompt's end that no other request of its batch has."""


class ProbeFailed(TwinpoolError):
    """Raised when a request of the calibration isn't answered."""


class ClusterProbes:
    """The calibration of one cluster."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        context: int,
        content: Content,
        say: Callable[[str], None],
        chunk_tokens: int = 512,
    ) -> None:
        """`context`: positions that a request may have. `content`: of prompts that no cache has. `chunk_tokens`: of a
        prefill step."""
        self._chunk = min(chunk_tokens, context - 8)
        self._endpoint, self._model, self._context = endpoint, model, context
        self._content, self._say = content, say
        self._number = 0
        self._gap_s = 0.0
        """Seconds of the quickest token after a first one."""

    async def prompts(self) -> list[PromptProbe]:
        """Each length some times, alone, and then several at once; the median of each."""
        await self._ask(self._fresh(64), 8)  # What is compiled or opened once isn't a cost of every request.
        found: list[PromptProbe] = []
        longest = self._context - 8
        lengths = sorted({*(tokens for tokens in PROMPTS if tokens < longest), longest} - {0})
        for tokens in lengths[: len(PROMPTS)]:
            outcomes = [await self._ask(self._fresh(tokens), 4) for _ in range(REPEATS)]
            gaps = [outcome.gaps_s[0] for outcome in outcomes if outcome.gaps_s]
            ttft = statistics.median(outcome.ttft_s for outcome in outcomes)
            found.append(PromptProbe(tokens, ttft, statistics.median(gaps) if gaps else 0.0))
            self._say(f"a prompt of {tokens:,} tokens: first token after {1e3 * ttft:,.1f} ms")
        self._gap_s = min(probe.gap_s for probe in found)
        return found + [await self._together(count) for count in TOGETHER]

    async def _together(self, count: int) -> PromptProbe:
        """Prompts at once that fill a step each; the median of when the last one has its first token."""
        last = []
        for _ in range(REPEATS):
            outcomes = await asyncio.gather(*(self._ask(self._fresh(self._chunk), 1) for _ in range(count)))
            last.append(max(outcome.ttft_s for outcome in outcomes))
        seconds = statistics.median(last)
        self._say(f"{count} prompts of {self._chunk:,} tokens at once: all first tokens after {1e3 * seconds:,.1f} ms")
        return PromptProbe(self._chunk, seconds, prompts=count)

    async def batches(self) -> list[BatchProbe]:
        """Batches of several sizes and lengths. Their prompts have their beginning in common, so that computing them
        takes next to nothing of the time that is measured."""
        least, most = ANSWER_TOKENS
        answer = min(self._context // 4, max(least, min(most, int(BATCH_S / max(self._gap_s, 1e-3)))))
        found = []
        for prompt in sorted({min(64, self._context // 4), self._context // 2}):
            common = self._fresh(prompt - _LAST)
            await self._ask((*common, *self._fresh(_LAST)), 4)
            for rows in ROWS:
                asks = (self._ask((*common, *self._fresh(_LAST)), answer) for _ in range(rows))
                token_s = token_time(await asyncio.gather(*asks))
                if token_s is None:
                    continue  # The first had ended before the last began.
                found.append(BatchProbe(rows, prompt + answer // 2, token_s))
                self._say(
                    f"{rows} answers at {prompt + answer // 2:,} positions: a token after {1e3 * token_s:,.2f} ms"
                )
        return found

    def _fresh(self, tokens: int) -> tuple[int, ...]:
        self._number += 1
        return self._content.block(self._number, tokens)

    async def _ask(self, prompt: Sequence[int], tokens: int) -> Outcome:
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        now = time.perf_counter()
        outcome = Outcome(now, now, len(prompt), tokens)
        await stream(self._endpoint, self._endpoint.encode("/v1/completions", body), outcome, TIMEOUT_S)
        if not outcome.ok or outcome.completion_tokens != tokens:
            said = outcome.error or f"{outcome.completion_tokens} tokens and not {tokens}"
            raise ProbeFailed(f"a request of the calibration failed: {said} {outcome.note}".strip())
        return outcome


def token_time(outcomes: Sequence[Outcome]) -> float | None:
    """Seconds from a token of an answer to its next, while all `outcomes` ran beside each other; None where that was
    too short. An event may carry several tokens: each counts as many as the answer's had on average."""
    begin = max(outcome.arrivals_s[min(1, len(outcome.arrivals_s) - 1)] for outcome in outcomes)
    end = min(outcome.arrivals_s[-1] for outcome in outcomes)
    tokens = 0.0
    for outcome in outcomes:
        events = sum(begin < at <= end for at in outcome.arrivals_s)
        each = outcome.output_tokens / len(outcome.arrivals_s)
        if events * each < MIN_EVENTS:
            return None
        tokens += events * each
    return (end - begin) * len(outcomes) / tokens


async def find_endpoint(url: str, key: str) -> tuple[Endpoint, str, int]:
    """The endpoint at `url`, its first model, and the positions that a request to it may have. Raises `ProbeFailed`."""
    try:
        endpoint = Endpoint.parse(url, [("Authorization", f"Bearer {key}")] if key else [])
        listed = await endpoint.ask("GET", "/v1/models")
        model = listed["data"][0]
        return endpoint, str(model["id"]), int(model["max_model_len"])
    except EndpointError as error:
        raise ProbeFailed(str(error)) from None
    except (LookupError, TypeError, ValueError):
        raise ProbeFailed(f"{url}/v1/models doesn't say how long requests may be (max_model_len)") from None


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
        if not source.url:
            measure_wakes(AdminClient.at(url), say)
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


def measure_wakes(operator: AdminClient, say: Callable[[str], None]) -> None:
    """Put a cluster to sleep at each level, wake it, and say how long that took: a request that wakes it
    (`cluster.sleep_after_s`) waits about so long. Raises `TwinpoolError` where it doesn't sleep, or wake, within
    `WAKE_S`."""
    workers = _ready(operator)
    for level in (1, 2):
        operator.call("POST", "/v1/sleep", json.dumps({"level": level, "wait": False}).encode())
        _until_ready(operator, 0)
        began = operator.clock()
        operator.call("POST", "/v1/wake", b'{"wait": false}')
        _until_ready(operator, workers)
        seconds = operator.clock() - began
        say(
            f"asleep at level {level} (cluster.sleep_level) it served again {seconds:,.1f} s after it was woken: a "
            f"first request waits about so long; have router.wake_timeout_s={max(1, math.ceil(2 * seconds))} or more"
        )


def _ready(operator: AdminClient) -> int:
    return sum(row["state"] == "ready" for row in operator.rows())


def _until_ready(operator: AdminClient, count: int) -> None:
    deadline = operator.clock() + WAKE_S
    while (found := _ready(operator)) != count:
        if operator.clock() > deadline:
            raise TwinpoolError(f"{found} workers serve after {WAKE_S:g} s, not {count}")
        operator.sleep(LOOK_S)


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
