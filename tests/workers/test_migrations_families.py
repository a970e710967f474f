"""State of every kind goes from decode worker to decode worker bit for bit: the answers are those of who stayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.family_scenes import tokens_of
from tests.support.migration_scenes import COUNT, expect_migrations_change_nothing
from tests.support.model_families import FAMILIES
from tests.support.stepped_cluster import company, generated, hears
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.contracts.messages.worker_events import MigrationDone
from twinpool.contracts.sampling_params import SamplingParams

FIRST = ["gemma3", "deepseek_v32", "qwen3_next", "falcon_h1"]
"""One with windows, one with index keys, two with recurrent states; the others take as long and are the soak's."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def test_a_migrated_request_goes_on_as_if_it_had_stayed(name: str, tmp_path: Path) -> None:
    expect_migrations_change_nothing(FAMILIES[name](tmp_path / name))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_what_is_sent_while_a_stream_stands_still_does_not_grow_with_its_length(name: str, tmp_path: Path) -> None:
    """Full pages go ahead, but for the last ones; windows and states go in the pause, and are what they are."""
    folder = FAMILIES[name](tmp_path / name)
    sizes: list[int] = []
    for length in (120, 600):
        with company(folder, decode={"migration_precopy_bytes": 1}, prefill={"chunk_tokens": 128}) as c:
            moved = hears(c, MigrationDone)
            rid = c.submit(tokens_of(5, length), SamplingParams(COUNT, temperature=0.8, seed=1))
            c.until(generated(c, rid, 9), "it to run")
            assert c.core.migrations.begin(c.told[rid].request)
            c.run(rid)
            spec = c.decode("decode-0").setup.manager.spec
            (event,) = moved
            assert isinstance(event, MigrationDone)
            sizes.append(event.bytes)
    full = spec.unit_bytes(spec.full.name)
    whole = sum(len(numbers) * spec.unit_bytes(pool) for pool, numbers in due(spec, 608).items())
    assert abs(sizes[1] - sizes[0]) <= 2 * full + max(spec.unit_bytes(p.name) for p in spec.pools)
    assert sizes[1] < whole - 20 * full
