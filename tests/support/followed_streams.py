"""Streamed completions as their client saw them, token by token, while something is done to the cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx


@dataclass
class FollowedStream:
    """One answer. Times are of `time.monotonic`."""

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """When each token arrived."""
    logprobs: list[float] = field(default_factory=list)
    """Of each token, where the request asks for them."""
    attempts: int = 1
    migrations: int = 0
    error: str = ""
    """What went wrong; empty: nothing."""

    def longest_gap_s(self, since_s: float) -> float:
        """Between two tokens, the second of them after `since_s`."""
        return max((b - a for a, b in pairwise(self.at_s) if b >= since_s), default=0.0)

    def pause_s(self, since_s: float) -> float:
        """From `since_s` to the token that ended the longest silence after it."""
        edges = [since_s, *(at for at in self.at_s if at > since_s)]
        gaps = [later - before for before, later in pairwise(edges)]
        return edges[1 + gaps.index(max(gaps))] - since_s

    def had(self, now_s: float) -> int:
        """Tokens that had come by `now_s`."""
        return sum(at <= now_s for at in self.at_s)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the stream."""
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices") or ():
            tokens = choice.get("token_ids") or ()
            self.tokens += tokens
            self.at_s += [time.monotonic()] * len(tokens)
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
        if seen := event.get("twinpool"):
            self.migrations, self.attempts = seen["migrations"], seen["attempts"]


async def follow(client: httpx.AsyncClient, body: Mapping[str, Any], stream: FollowedStream) -> FollowedStream:
    """Ask for one streamed completion, which must name its token ids, and follow it to its end."""
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Twinpool-Timeline": "1"}) as answer:
            if answer.status_code != 200:
                stream.error = f"http {answer.status_code}: {(await answer.aread())[:200]!r}"
                return stream
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    stream.take(json.loads(line[6:]))
                elif line == "data: [DONE]":
                    return stream
        stream.error = stream.error or "the stream broke off"
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream
