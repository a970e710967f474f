"""What migration must show for a family: a request goes from decode worker to decode worker as if it had stayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.family_scenes import CHUNK, PAGE, tokens_of
from tests.support.stepped_cluster import company, generated, hears
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.contracts.messages.worker_events import MigrationDone
from twinpool.contracts.sampling_params import SamplingParams

COUNT = 30


def expect_migrations_change_nothing(folder: Path, engine: dict[str, Any] | None = None) -> None:
    """Three requests in the middle of their answers migrate; tokens are those of three that stay."""
    prompts = [tokens_of(seed, length) for seed, length in enumerate((70, 131, 38))]
    options = [SamplingParams(COUNT, temperature=0.8, seed=seed) for seed in range(3)]
    with company(folder, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": CHUNK}, engine=dict(engine or {})) as c:
        stayed = c.run(*[c.submit(p, o) for p, o in zip(prompts, options, strict=True)])
    with company(
        folder, cache={"page_tokens": PAGE}, prefill={"chunk_tokens": CHUNK}, tokens=4096, engine=dict(engine or {})
    ) as c:
        moved = hears(c, MigrationDone)
        rids = [c.submit(p, o) for p, o in zip(prompts, options, strict=True)]
        for number, rid in enumerate(rids):
            # At different places within a page, and within what recurrent layers gather.
            c.until(generated(c, rid, 9 + 3 * number), "it to run")
            assert c.core.migrations.begin(c.told[rid].request)
            c.act()
        c.until(lambda: c.core.migrations.counts.migrated == 3, "all to move")
        assert c.run(*rids) == stayed
        spec = c.decode("decode-0").setup.manager.spec
        least = sum(min(len(n), 1) * spec.unit_bytes(pool) for pool, n in due(spec, 60).items())
        assert min(event.bytes for event in moved if isinstance(event, MigrationDone)) >= least, (
            "something of every pool"
        )
        assert all(not told.replays for told in c.told.values())
