"""Retracted requests behind the real router: clients see whole answers, whether state is copied or computed again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served_cluster import Answer, complete
from tests.support.worker_pair import pair
from tests.workers.test_retraction import PAGE, prompt_of, undisturbed
from tests.workers.test_violations import behind_a_router
from twinpool.contracts.ids import Role

ASKED = [(prompt_of(seed, 10 + 20 * seed), 24) for seed in range(4)]


async def ask_all(url: str) -> list[Answer]:
    """All at once, as streams."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bodies = [
            {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0.0, "stream": True,
             "return_token_ids": True, "ignore_eos": True}
            for prompt, count in ASKED
        ]  # fmt: skip
        return await asyncio.gather(*(complete(client, body) for body in bodies))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copy", "recompute"])
def test_streams_go_on_as_if_nothing_had_happened(model: Path, way: str) -> None:
    expected = undisturbed(model, ASKED)
    decode: dict[str, Any] = {"retract": way, "cache": {"host_bytes": 1 << 22}}
    sizes = {Role.PREFILL: 4096, Role.DECODE: 16 * PAGE}
    sections: dict[str, Any] = {"cache": {"page_tokens": PAGE}, "decode": decode, "faults": {"retract_every": 6}}
    with pair(model, tokens=sizes, settle=False, **sections) as both:
        with behind_a_router(both, model) as url:
            answers = asyncio.run(ask_all(url))
            metrics = httpx.get(f"{url}/metrics", timeout=60).text
        counters = both.decode.status().counters
        assert both.decode.check().violations == ()
    assert [answer.tokens for answer in answers] == expected
    assert counters["retractions"] > 3
    assert (counters["recomputed"] > 0) is (way == "recompute")
    assert (counters["resumptions"] > 0) is (way == "copy")
    assert f"twinpool_attempts_recomputed_total {counters['recomputed']}" in metrics
    assert "twinpool_replays_total 0.0" in metrics, "being retracted is nobody's failure"
