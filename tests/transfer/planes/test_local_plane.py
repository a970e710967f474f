"""Plane `local`: what it refuses, and what its links count. What it carries is in the tests of rooms."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import ends
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import LayoutMismatch
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageWrite, RoomTarget
from twinpool.transfer.planes.direct.direct_link import LocalPlane

SPEC = pool_sets()["full"]


def test_pools_on_two_devices_are_refused() -> None:
    writer, reader = (LocalPlane(FaultsConfig(), lambda: None) for _ in "wr")
    slots = torch.zeros(1, SLOT_BYTES, dtype=torch.uint8)
    counts = SPEC.even(4)
    writer.register(PoolSet(SPEC, counts), None)
    reader.register(PoolSet(SPEC, counts), slots)
    writer.connect(reader.describe()).close()
    elsewhere = torch.empty(PoolSet(SPEC, counts).layout.nbytes, dtype=torch.uint8, device="meta")
    reader.register(PoolSet(SPEC, counts, elsewhere), slots)
    with pytest.raises(LayoutMismatch, match="the reader's pools lie on meta, the writer's on cpu"):
        writer.connect(reader.describe())
    for plane in (writer, reader):
        plane.close()


@pytest.mark.parametrize("plane", ["local", "shm"])
def test_a_link_counts_its_writes_and_their_bytes_also_of_some_layers(plane: str) -> None:
    with ends(pool_sets()["all"], plane) as both:
        prompt = both.prompt(20)
        both.open(prompt)
        link = next(iter(both.sender_peers.values())).link
        target = RoomTarget(prompt.room, prompt.runs, 0)
        whole = PageWrite(target, prompt.runs)
        some = PageWrite(target, prompt.runs, 2, {pool: range(0, 1) for pool in prompt.runs})
        for write in (whole, some, whole):
            link.post(write)
        entries = {
            pool: [b.entry_bytes(both.spec.page_tokens) for b in both.spec.by_name[pool].buffers]
            for pool in prompt.runs
        }
        layers = {pool: [b.layers for b in both.spec.by_name[pool].buffers] for pool in prompt.runs}
        first = sum(len(run) * sum(entries[pool]) for pool, run in prompt.runs.items())
        every = sum(
            len(run) * sum(n * e for n, e in zip(layers[pool], entries[pool], strict=True))
            for pool, run in prompt.runs.items()
        )
        assert (link.sent.writes, link.sent.nbytes) == (3, 2 * every + first)
        assert every > first
