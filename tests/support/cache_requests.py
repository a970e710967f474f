"""Requests of a `World`, and what the pages of every prefix hold in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_port import Completion
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.cache.tiers.prefetch import PrefetchRequest


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes]."""
    return rows.contiguous().view(torch.uint8).view(len(rows), -1)


@lru_cache(4096)
def content(key: bytes, pool: str, nbytes: int) -> torch.Tensor:
    """What a page (or slot) of `pool` holds after the tokens that `key` names: uint8 [nbytes]."""
    seed = int.from_bytes(hashlib.blake2b(key + pool.encode(), digest_size=8).digest())
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@dataclass(eq=False)
class Step:
    """One forward pass under way."""

    completion: Completion
    end: int
    """Pages that are computed when it is done."""
    copied: list[Completion]
    """The snapshot after it, launched with it."""
    wrong: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Visitor:
    """One request."""

    name: str
    prefix: TokenPrefix
    reusable: int
    """Pages of it that need not be computed."""
    prefetch: PrefetchRequest | None
    allocation: Allocation | None = None
    done: int = 0
    """Committed pages."""
    steps: list[Step] = field(default_factory=list)
    """Launched and not committed, at most two."""
    sends: list[Completion] = field(default_factory=list)

    @property
    def launched(self) -> int:
        """Pages that have been launched."""
        return self.steps[-1].end if self.steps else self.done
