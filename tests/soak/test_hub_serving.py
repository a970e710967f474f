"""`serve --model org/name` on a Hub on loopback, and again without it, from the cache: the same answers.

Folders and GGUF files alike, in processes of their own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.gguf_files import GgufOracle, write_gguf
from tests.support.hub_server import hub_of
from tests.support.served_cluster import complete, serving

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = [5, 9, 200, 31, 7] * 30


def answer_of(model: str, runtime: Path) -> tuple[str, list[int]]:
    """What clients call the model, and its greedy answer."""
    sections = {"engine": {"dtype": "float32"}, "transfer": {"plane": "local"}}
    with serving(model, runtime, sections=sections, ready_within=300, orderly=False) as cluster:

        async def ask() -> list[int]:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
                return (await complete(client, cluster.body(PROMPT, max_tokens=24))).tokens

        return cluster.model, asyncio.run(ask())


def test_a_name_is_served_and_without_the_hub_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "published")
    file = write_gguf(folder, folder / "small.gguf", "llama", "Q8_0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    oracles = {"org/name": Oracle(folder), "org/name/small.gguf": GgufOracle(file)}
    names = {"org/name": "org/name", "org/name/small.gguf": "small"}
    found = {}
    with hub_of("org/name", folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for model, oracle in oracles.items():
            name, found[model] = answer_of(model, tmp_path / "run")
            assert name == names[model]
            assert compare(oracle, PROMPT, found[model]).equal
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in oracles:
        assert answer_of(model, tmp_path / "again")[1] == found[model]
