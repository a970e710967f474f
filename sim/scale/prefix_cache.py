"""The prefix cache of a modelled prefill worker: blocks on its device and in its host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST

CacheChange = tuple[bool, int, list[int]]
"""Whether blocks came or went, the tier, and their keys: what a KV event says."""


class PrefixCache:
    """Blocks by key, the least recently used first: from the device they go to the host, from there altogether. Sizes
    are in blocks."""

    def __init__(self, device: int, host: int) -> None:
        self._device_room, self._host_room = device, host
        self._device: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._device) + len(self._host)

    @property
    def on_device(self) -> int:
        return len(self._device)

    @property
    def on_host(self) -> int:
        return len(self._host)

    def match(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """How many of the first `most` blocks are here, as far as none is missing, and how many of them on the host
        alone."""
        device, host, held, loaded = self._device, self._host, 0, 0
        for key in keys[:most]:
            if key not in device:
                if key not in host:
                    break
                loaded += 1
            held += 1
        return held, loaded

    def use(self, keys: Sequence[int]) -> list[CacheChange]:
        """Have all of a prompt's blocks on the device, as the latest used; returns what changed."""
        device, host = self._device, self._host
        new = [key for key in keys if key not in device]
        for key in reversed(keys):  # Deepest first, so that a chain's head outlives its tail.
            device[key] = None
            device.move_to_end(key)
        changes: list[CacheChange] = [(True, DEVICE, new)] if new else []
        if len(device) <= self._device_room:
            return changes
        out = [device.popitem(last=False)[0] for _ in range(len(device) - self._device_room)]
        changes.append((False, DEVICE, out))
        if self._host_room:
            for key in out:
                host[key] = None
                host.move_to_end(key)
            changes.insert(-1, (True, HOST, out))
            gone = [host.popitem(last=False)[0] for _ in range(len(host) - self._host_room)]
            if gone:
                changes.append((False, HOST, gone))
        return changes
