"""Conversations through a whole cluster with all tiers, for `make test` and the soak.

Prefill's device pools hold about a twentieth of what the conversations touch, the host tier a part of it, storage all
of it. What the answers say about hits must be what the trace allows, and the tokens those of a pair of workers in one
process that has room for everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.conversations import Talk, Turn, working_set
from tests.support.served_cluster import Serving, complete
from tests.support.tier_conversations import PAGE, PAGE_BYTES, TOKENS, converse
from tests.support.worker_pair import pair
from twinpool.contracts.ids import Role


@dataclass(frozen=True)
class Trace:
    """Conversations, and what they are when nothing disturbs them."""

    talks: list[Talk]
    at_once: int
    """Conversations that are held at the same time."""
    answers: dict[tuple[int, int], tuple[int, ...]]
    pages: int
    """That all of it touches."""
    longest: int
    """Pages of the longest request, answer included."""


def undisturbed(folder: Path, talks: list[Talk], at_once: int) -> Trace:
    """Run them with everything on the device."""
    with pair(folder, tokens=1 << 17, cache={"page_tokens": PAGE}) as both:
        turns = converse(both, talks, at_once)
        assert both.prefill.status().counters["pages_evicted"] == 0
    answers = {(t.talk, t.number): t.answer for t in turns}
    longest = max(-(-(len(t.prompt) + TOKENS) // PAGE) for t in turns)
    return Trace(talks, at_once, answers, working_set(turns, PAGE), longest)


def settings(trace: Trace, storage: Path, plane: str, *, decode_tiers: bool) -> dict[str, dict[str, Any]]:
    """Prefill's pool is 5 % of the working set, or one request where that is more. The host has room for what all
    conversations wait for at once: only so are hits exact."""
    host = trace.at_once * trace.longest
    assert host < trace.pages / 2, "the host is to be too small for all of it"
    return {
        "transfer": {"plane": plane},
        # With threads for copies and sends pages are free a little later, which may cost no prefix.
        "engine": {"threads": 1, "copy_threads": "on"},
        # What caches hold is counted exactly, and an audit takes pages from them.
        "audit": {"fraction": 0},
        "cache": {
            "page_tokens": PAGE,
            "host_bytes": (1 + host) * PAGE_BYTES,
            "load_back": "always",
            "prefetch.policy": "wait_complete",
            "storage.backend": "file",
            "storage.path": storage,
        },
        "prefill": {"cache.device_tokens": PAGE * max(trace.longest, trace.pages // 20)},
        "decode": {
            "cache.device_tokens": PAGE * trace.pages // 6,
            "cache.host_bytes": (1 + host) * PAGE_BYTES if decode_tiers else 0,
        },
    }


def run(cluster: Serving, trace: Trace) -> list[Turn]:
    """Every conversation to its end over HTTP, so many at a time; turns in order of their end."""

    waiting = deque(enumerate(trace.talks))
    answers: list[list[tuple[int, ...]]] = [[] for _ in trace.talks]
    turns: list[Turn] = []

    async def hold(client: httpx.AsyncClient) -> None:
        while waiting:
            number, talk = waiting.popleft()
            mine = answers[number]
            while True:
                prompt = talk.prompt(mine)
                answer = await complete(client, cluster.body(prompt, max_tokens=TOKENS))
                turns.append(_turn(number, len(mine), prompt, answer.tokens, answer.twinpool))
                mine.append(turns[-1].answer)
                if len(mine) == len(talk.says):
                    break
                if not talk.goes_on_at_once(len(mine)):
                    waiting.append((number, talk))
                    break

    async def all_of_them() -> list[Turn]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
            await asyncio.gather(*[hold(client) for _ in range(trace.at_once)])
        return turns

    return asyncio.run(all_of_them())


def _turn(talk: int, number: int, prompt: Sequence[int], answer: Sequence[int], said: dict[str, Any]) -> Turn:
    assert said["attempts"] == 1
    assert said["computed"]["decode"] == 0
    assert said["cached_tokens"] == sum(said["cached_by_tier"].values())
    return Turn(
        talk, number, tuple(prompt), tuple(answer), said["cached_by_tier"], said["computed"]["prefill"],
        said["held_by_decode"], said["transfer_bytes"],
    )  # fmt: skip


def counters(cluster: Serving, role: Role) -> Counter[str]:
    """Of all workers of a role."""
    found = Counter[str]()
    for worker in cluster.status().values():
        if worker["role"] == role:
            found.update(worker["counters"])
    return found


def found_by_tier(turns: Sequence[Turn]) -> Counter[str]:
    return sum((Counter(t.tiers) for t in turns), Counter())


def warm_systems(cluster: Serving, talks: Sequence[Talk]) -> None:
    """Ask for what several begin with once, alone: who meets damage there first is then known."""
    for system in sorted({talk.system for talk in talks if talk.system}):
        cluster.complete([*system, *[1] * PAGE], max_tokens=1)
