"""A colocated worker on state of every kind, stepped by hand: its tokens are a hash of the state that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.colocated_worker import Colocated
from tests.support.hash_workers import hash_worker
from tests.support.pool_sets import pool_sets
from tests.support.worker_pair import UnhurriedClock
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.colocate.worker import ColocatedWorker
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role

PAGE = 4


class HashColocated(Colocated):
    """See the module's prose; `pool_sets` has the name of what it keeps."""


@contextmanager
def hash_colocated(
    name: str, count: int, *, clock: Clock | None = None, device: Device | None = None, **sections: Any
) -> Iterator[HashColocated]:
    """A worker with `count` pages in each pool, which is checked for leaks at the end."""
    config = {"cache": {"page_tokens": PAGE, **sections.pop("cache", {})}, "transfer": {"plane": "local"}, **sections}
    config["decode"] = {"prefix_offer_bytes": 0, **sections.get("decode", {})}
    clock = clock or UnhurriedClock()
    worker = hash_worker(
        Role.COLOCATED, pool_sets(PAGE)[name], config_from_dict(config), count, clock, device or CpuDevice()
    )
    assert isinstance(worker, ColocatedWorker)
    both = HashColocated(worker, clock)
    try:
        yield both
        both.settle()
    finally:
        worker.close()
