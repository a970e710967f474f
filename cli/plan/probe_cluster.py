"""Probes of a cluster that serves nobody else: prompts one at a time, and batches of answers, as a client sees them.

So the costs have everything in them that a request meets: the router, the messages, the hand-over.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.cli.replay.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.replay.trace_prompts import Content
from twinpool.contracts.errors import TwinpoolError
from twinpool.sim.scale.measured_costs import BatchProbe, PromptProbe

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
