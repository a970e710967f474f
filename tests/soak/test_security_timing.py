"""The time to the first token tells a tenant nothing of another's prompts: two samples, compared by ranks.

No bound on a time: only whether prompts that another tenant has cached come sooner than prompts that nobody has asked.
The same comparison finds the tenant's own cached prompts, so it would find another's.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.served_cluster import Access, serving, until
from twinpool.cli.credential_commands import new_key

pytestmark = [pytest.mark.soak, pytest.mark.slow]

SAMPLES = 120
TOKENS = 640
GENEROUS = 4.5
"""Standard deviations: where nothing differs, one run in 150,000 is beyond."""
CLEAR = 8.0


def rank_distance(ones: Sequence[float], others: Sequence[float]) -> float:
    """Mann and Whitney's U of two samples, in standard deviations: below 0 where `ones` are the smaller."""
    n, m = len(ones), len(others)
    below = sum((one > other) + 0.5 * (one == other) for one in ones for other in others)
    return (below - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def test_the_comparison_finds_what_differs_and_nothing_else() -> None:
    rng = random.Random(1)
    one, other = ([rng.gauss(10, 1) for _ in range(SAMPLES)] for _ in range(2))
    assert abs(rank_distance(one, other)) < GENEROUS
    assert rank_distance([x - 2 for x in one], other) < -CLEAR
    assert rank_distance([1.0] * 50, [1.0] * 50) == 0


@pytest.mark.timeout(1200)
def test_a_foreign_tenants_cached_prompt_comes_no_sooner_than_one_that_nobody_asked(tmp_path: Path) -> None:
    file, rng = tmp_path / "keys.json", random.Random(20261125)
    victim, rival = new_key(file, "victim"), new_key(file, "rival")
    sections = {"security": {"keys_file": file}, "transfer": {"plane": "local"}, "audit": {"fraction": 0}}
    with (
        serving("demo", tmp_path / "run", sections=sections, access=Access(key=victim)) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120) as web,
    ):

        def ask(key: str, prompt: list[int]) -> tuple[float, int]:
            """Seconds to the first token, and how many tokens of the prompt were reused."""
            body = {
                "model": cluster.model, "prompt": prompt, "max_tokens": 2, "stream": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            began, first, reused = time.perf_counter(), 0.0, 0
            with web.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as got:
                assert got.status_code == 200, got.read()
                for line in got.iter_lines():
                    if line.startswith("data: {") and not first:
                        first = time.perf_counter() - began
                    if '"cached_tokens"' in line:
                        reused = int(line.split('"cached_tokens":')[1].split("}")[0].strip(" ,"))
            return first, reused

        def prompt() -> list[int]:
            return [rng.randrange(200, 1000) for _ in range(TOKENS)]

        foreign: list[float] = []
        nobodys: list[float] = []
        own: list[float] = []
        for _ in range(SAMPLES):
            cached, fresh = prompt(), prompt()
            ask(victim, cached)
            until(lambda cached=cached: ask(victim, cached)[1] > TOKENS // 2, "the prompt to be cached")  # type: ignore[misc]
            kinds = [(foreign, rival, cached), (nobodys, rival, fresh), (own, victim, cached)]
            rng.shuffle(kinds)
            for sample, key, tokens in kinds:
                seconds, reused = ask(key, tokens)
                assert (reused > 0) is (sample is own)
                sample.append(seconds)
        z, power = rank_distance(foreign, nobodys), rank_distance(own, nobodys)
        print(f"foreign against nobody's: z = {z:.2f}; own against nobody's: z = {power:.2f}")
        assert power < -CLEAR, "the comparison sees a cached prompt"
        assert abs(z) < GENEROUS
