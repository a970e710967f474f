"""One writing rank's links to the ranks of a reader: which rank writes what to which is worked out once, when two
workers meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.head_slices import HeadSlice, RankCount, cuts
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.transfer.planes.data_plane import PageWrite, RoomTarget, SentCounts, SlotWrite, WriteLink

MAX_RANKS = 64
"""Most ranks of a worker: a peer that claims more is refused."""

_STAGED = 1 << 8
"""What one more stage adds to `packed_ranks`."""

_cuts = lru_cache(maxsize=64)(cuts)


class RankFan:
    """The links of one writing rank to the ranks of a reader that it writes to.

    `leader` goes to the reader's rank 0, which alone has metadata slots and takes notices; it is None at a rank that
    isn't the writer's leader. Pages go down the links of `parts`.
    """

    ranked = False

    def __init__(self, leader: WriteLink | None, parts: Sequence[WriteLink]) -> None:
        self._leader = leader
        self._parts = parts
        self.layered = all(link.layered for link in parts)
        self.frame_bytes = min((b for link in self._links() if (b := link.frame_bytes) is not None), default=None)

    @property
    def sent(self) -> SentCounts:
        return SentCounts.total(link.sent for link in self._links())

    def admit(self, target: RoomTarget) -> None:
        for link in self._links():
            link.admit(target)

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        if isinstance(write, SlotWrite):
            assert self._leader is not None, "only leaders write metadata"
            return self._leader.post(write)
        posted: list[Completion] = []
        try:
            for link in self._parts:
                posted.append(link.post(write))
        except BaseException:
            # Whoever posts hears of a failed write alone, and gives its pages back: nothing may be reading them then.
            with contextlib.suppress(RuntimeError):
                AllWrites(posted).wait()
            raise
        return DONE if all(p is DONE for p in posted) else AllWrites(posted)

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        assert self._leader is not None, "only leaders give notice"
        self._leader.notify(room, data, writes)

    def cut(self) -> bool:
        # No link may be left out: each tells of a cut once.
        return any([link.cut() for link in self._links()])

    @property
    def up(self) -> bool:
        return all(link.up for link in self._links())

    def sever(self) -> None:
        for link in self._links():
            link.sever()

    def close(self) -> None:
        for link in self._links():
            link.close()

    def _links(self) -> list[WriteLink]:
        return list({id(link): link for link in (self._leader, *self._parts) if link is not None}.values())


class AllWrites:
    """A completion that is done when all of `completions` are."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions

    @property
    def done(self) -> bool:
        return all(c.done for c in self._completions)

    def wait(self) -> None:
        """Return once all are over, also where one fails before others; then raises the first one's error."""
        failed: RuntimeError | None = None
        for completion in self._completions:
            try:
                completion.wait()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def order(self) -> None:
        for completion in self._completions:
            completion.order()


LinkOpener = Callable[[dict[str, Any], PoolSetSpec, HeadSlice | None], WriteLink]
"""Opens the link to one rank of a reader. It is given the rank's part of the descriptor, the pools that the rank
holds, and what is written to it; None: all of every page, as both ranks hold the same."""


def fan(spec: PoolSetSpec, rank: int, size: int, descriptor: Mapping[str, Any], open_link: LinkOpener) -> WriteLink:
    """Open the links of rank `rank` of `size`, whose pools are `spec`, to the reader with this descriptor. Raises
    `LayoutMismatch` for what is no descriptor, and where workers of such ranks can't share the model's state."""
    parts, readers = described_ranks(descriptor)
    whole, mine = spec.whole, RankCount(size, spec.stages)
    if size == readers.size == 1:
        return open_link(parts[0], whole, None)
    links: dict[int, WriteLink] = {}
    try:
        try:
            found = _cuts(whole, mine, readers)
        except ConfigError as error:
            raise LayoutMismatch(f"{_counted(readers)} can't share this model's state: {error}") from None
        for target, part in enumerate(parts):
            cut = found.get((rank, target))
            if cut is not None or (rank == 0 and target == 0):
                links[target] = open_link(part, whole.shard(target, *readers), cut or {})
    except BaseException:
        for link in links.values():
            link.close()
        raise
    writing = [link for target, link in links.items() if (rank, target) in found]
    return RankFan(links[0] if rank == 0 else None, writing)


def described_ranks(descriptor: Mapping[str, Any]) -> tuple[Sequence[dict[str, Any]], RankCount]:
    """A reader's ranks, each as its part of the descriptor. Raises `LayoutMismatch` for what is no descriptor.

    Ranks in stages are named by another key: a writer that knows no stages refuses the reader.
    """
    stages = descriptor.get("stages", 1)
    ranks = descriptor.get("ranks" if stages == 1 else "staged")
    if not isinstance(ranks, list | tuple) or not 0 < len(ranks) <= MAX_RANKS:
        raise LayoutMismatch(f"the reader's descriptor must name 1 to {MAX_RANKS} ranks")
    if type(stages) is not int or not 0 < stages <= len(ranks) or len(ranks) % stages:
        raise LayoutMismatch(f"the reader's {len(ranks)} ranks can't be in {stages!r:.80} stages")
    return ranks, RankCount(len(ranks), stages)


def describe_ranks(parts: Sequence[dict[str, Any]], stages: int) -> dict[str, Any]:
    """The inverse of `described_ranks`."""
    return {"ranks": [*parts]} if stages == 1 else {"stages": stages, "staged": [*parts]}


def packed_ranks(ranks: RankCount) -> int:
    """How many ranks a writer has, as its messages say it: where there are no stages, as they always did."""
    return ranks.size + _STAGED * (ranks.stages - 1)


def unpacked_ranks(packed: int) -> RankCount:
    """The inverse of `packed_ranks`. Raises `ValueError` for what it never gives."""
    stages, size = divmod(packed, _STAGED)
    if not (0 < size <= MAX_RANKS and 0 <= stages < size and size % (stages + 1) == 0):
        raise ValueError(f"{packed} ranks")
    return RankCount(size, stages + 1)


def _counted(ranks: RankCount) -> str:
    return f"{ranks.size} ranks" + (f" in {ranks.stages} stages" if ranks.stages > 1 else "")


def rank_cut(whole: PoolSetSpec, source: tuple[int, RankCount], target: tuple[int, RankCount]) -> HeadSlice:
    """Return what one rank of a writer writes to one rank of a reader, each given with how many there are. Raises
    `LookupError` where it writes nothing, and `ConfigError` where such ranks can't share the model's state."""
    return _cuts(whole, source[1], target[1])[source[0], target[0]]


def writers(spec: PoolSetSpec, sources: int, rank: int, size: int) -> frozenset[int]:
    """Return the ranks of a writer, of as many as `sources` says (`packed_ranks`), that write to rank `rank` of a
    reader with `size` ranks, whose pools are as `spec` says."""
    found = _cuts(spec.whole, unpacked_ranks(sources), RankCount(size, spec.stages))
    return frozenset(source for source, target in found if target == rank)
