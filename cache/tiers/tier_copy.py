"""The copier of pages between device and host memory: every copy from one pool set to another goes through it.

Backup and swap-out copy down in pieces, swap-in copies up in pieces, load back layer by layer. Each piece or layer is
one operation of the device, so that other copies get their turn, and temporaries (none between a device and pinned host
memory) are bounded by a piece. Both ends are pinned until the last operation has ended (hazard A6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from twinpool.cache.device.device_port import DEVICE, HOST, Completion, Device, DeviceOp, DeviceStream, attempt, spans
from twinpool.cache.memory.page_moves import PageMove, describe_spec
from twinpool.cache.pool.page_allocator import Pin
from twinpool.cache.pool.page_extent import PageExtents
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.tiers.in_flight_copy import DigestReader, InFlightCopy
from twinpool.contracts.errors import LayoutMismatch


class TierCopy:
    """Copies from `source` to `target`: `SAVE` from the device to the host, `LOAD` from the host to the device."""

    def __init__(self, device: Device, source: PoolSet, target: PoolSet, stream: DeviceStream) -> None:
        """Raises `LayoutMismatch` where the two pool sets hold state of different models."""
        here, there = describe_spec(source.spec), describe_spec(target.spec)
        if here != there:
            raise LayoutMismatch(f"state of {here} can't be moved to or from pools of {there}")
        self._device, self._source, self._target, self._stream = device, source, target, stream
        self._saving = stream is DeviceStream.SAVE
        self._ends = (DEVICE, HOST) if self._saving else (HOST, DEVICE)

    def by_pieces(
        self,
        name: str,
        move: PageMove,
        chunk_bytes: int,
        *,
        digested: PageExtents | None = None,
        after: Sequence[Completion] = (),
    ) -> InFlightCopy:
        """Begin a copy in pieces of at most `chunk_bytes`, each an operation that runs after those in `after`.

        `digested`: the token positions that the pages on the device hold; their digests are then taken with the copy,
        before pages are saved or after they were loaded. An operation that the device refuses ends the copy as failed.
        """
        digests: dict[str, list[DigestReader]] | None = None
        if digested is not None:
            digests = {pool: [] for pool in digested}
        copied: Counter[str] = Counter()
        operations = []
        for piece in move.chunks(self._source.spec, chunk_bytes):
            (part,) = piece.parts
            at = slice(copied[part.pool], copied[part.pool] + len(piece))
            copied[part.pool] += len(piece)
            run = partial(self._copy, piece)
            if digests is not None:
                assert digested is not None
                run = partial(self._copy_digested, piece, digested, at, digests)
            operations.append(partial(self._submit, name, piece, run, after=after))
        return InFlightCopy(self._pins(move, name), operations, digests)

    def by_layers(self, name: str, move: PageMove, *, digested: PageExtents | None = None) -> InFlightCopy:
        """Begin a copy of one layer of every pool after the other; readers of a layer of the target wait at its load
        gate.

        `digested`: pages among the targets whose digests are taken when all layers have come, with the positions that
        they hold.
        """
        layers = {part.pool: self._source.spec.by_name[part.pool].layers for part in move.parts}

        def submit(layer: int) -> Completion:
            here = PageMove(tuple(part for part in move.parts if layer < layers[part.pool]))
            run = partial(self._source.copy, here, self._target, range(layer, layer + 1))
            completion = self._submit(f"{name} layer {layer}", here, run, (layer,))
            for part in here.parts:
                self._target.gates[part.pool].expect(layer, completion)
            return completion

        operations = [partial(submit, layer) for layer in range(max(layers.values(), default=0))]
        digests: dict[str, list[DigestReader]] | None = None
        if digested is not None:
            digests = {pool: [] for pool in digested}
            operations.append(partial(self._submit_digests, name, digested, digests))
        return InFlightCopy(self._pins(move, name), operations, digests)

    def _submit_digests(self, name: str, digested: PageExtents, digests: dict[str, list[DigestReader]]) -> Completion:
        """Begin an operation that takes the digests of pages of the target."""

        def run() -> None:
            for pool, extent in digested.items():
                digests[pool].append(self._target.digesting(pool, extent.indices, extent.firsts, extent.ends))

        reads = spans(self._ends[1], {pool: extent.indices for pool, extent in digested.items()})
        return attempt(self._device, DeviceOp(f"{name} digests", self._stream, reads), run)

    def _submit(
        self,
        name: str,
        move: PageMove,
        run: Callable[[], object],
        layers: Sequence[int] | None = None,
        after: Sequence[Completion] = (),
    ) -> Completion:
        source, target = self._ends
        reads = spans(source, {part.pool: part.sources for part in move.parts}, layers)
        writes = spans(target, {part.pool: part.targets for part in move.parts}, layers)
        return attempt(self._device, DeviceOp(name, self._stream, reads, writes), run, after)

    def _copy(self, move: PageMove) -> None:
        self._source.copy(move, self._target)

    def _copy_digested(
        self, move: PageMove, extents: PageExtents, at: slice, digests: dict[str, list[DigestReader]]
    ) -> None:
        (part,) = move.parts
        extent = extents[part.pool]
        pools, indices = (self._source, part.sources) if self._saving else (self._target, part.targets)
        digest = partial(pools.digesting, part.pool, indices, extent.firsts[at], extent.ends[at])
        if self._saving:
            digests[part.pool].append(digest())
        self._copy(move)
        if not self._saving:
            digests[part.pool].append(digest())

    def _pins(self, move: PageMove, name: str) -> list[Pin]:
        return [
            pools.allocators[part.pool].pin(indices, name)
            for part in move.parts
            for pools, indices in ((self._source, part.sources), (self._target, part.targets))
        ]
