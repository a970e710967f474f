"""Plane `local`: what it refuses. What it carries is in the tests of rooms."""

from __future__ import annotations

import pytest
import torch

from cache.pool.pool_set import PoolSet
from contracts.config.cluster_config import FaultsConfig
from contracts.errors import LayoutMismatch
from tests.poolsets import pool_sets
from transfer.planes.data_plane import SLOT_BYTES
from transfer.planes.direct.local_plane import LocalPlane

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
