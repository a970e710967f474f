"""The copier of pages between device and host memory: every copy from one pool set to another goes through it.

Backup and swap-out copy down in pieces, swap-in copies up in pieces, load back layer by layer. Each piece or layer is
one operation of the device, so that other copies get their turn, and temporaries (none between a device and pinned host
memory) are bounded by a piece.

Both ends of a copy stay pinned until the device has finished the last of its operations, failed ones included (hazard
A6): pages whose lease is released meanwhile go into quarantine, not into the free list. An operation that fails ends
the copy as failed; none of its pages counts as copied. The pins go only when the owner of the copy asks `done`, or
waits: `InFlightPins.hold` does so for copies whose result isn't needed any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from twinpool.cache.device.device_port import (
    DEVICE,
    DONE,
    HOST,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    attempt,
    spans,
)
from twinpool.cache.memory.page_moves import PageMove, describe_spec
from twinpool.cache.pool.page_allocator import Pin
from twinpool.cache.pool.pool_set import PageExtents, PoolSet
from twinpool.contracts.errors import LayoutMismatch

DigestReader = Callable[[], list[int]]
"""Returns the digests that an operation began to take; waits until they are there."""


class InFlightCopy:
    """The operations and pins of one copy, and its `Completion`."""

    def __init__(
        self,
        pins: Sequence[Pin],
        operations: Sequence[Callable[[], Completion]],
        digests: Mapping[str, Sequence[DigestReader]] | None = None,
    ) -> None:
        """Submit the operations, in order. Where submitting one raises, wait for those before it, release the pins and
        raise the error.

        `digests`, by pool, is filled by the operations as they run, in their order.
        """
        self._pins, self._digests = pins, digests
        self.completions: list[Completion] = []
        self.ended = False
        """Whether the copy is known to have ended; `done` looks anew."""
        self._error: Exception | None = None
        try:
            for submit in operations:
                self.completions.append(submit())
        except BaseException:
            self._end()
            raise
        if all(c is DONE for c in self.completions):
            self._end()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not. Asking releases the pins of a copy that has."""
        if not self.ended and all(c.done for c in self.completions):
            self._end()
        return self.ended

    def wait(self) -> None:
        """Block until the copy has ended; raises the first error of its operations."""
        self._end()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        """Order the rest of the device operation that is running now after this copy."""
        for completion in self.completions:
            completion.order()

    @property
    def failed(self) -> bool:
        """Whether a device error ended this copy, which must be done.

        Any other error than `RuntimeError` is raised: a checking device raises these for bugs.
        """
        assert self.done, "a copy that is under way has neither failed nor succeeded"
        if self._error is not None and not isinstance(self._error, RuntimeError):
            raise self._error
        return self._error is not None

    def digests(self) -> dict[str, list[int]] | None:
        """Returns, by pool, the digests of the copied pages on the device, in order; None if the copy takes none.

        The copy must be done and not failed.
        """
        assert not self.failed
        if self._digests is None:
            return None
        return {pool: [digest for read in readers for digest in read()] for pool, readers in self._digests.items()}

    def _end(self) -> None:
        if self.ended:
            return
        for completion in self.completions:
            try:
                completion.wait()
            except Exception as error:
                self._error = self._error or error
        self.ended = True
        for pin in self._pins:
            pin.release()


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
