"""Storage objects that workers of any number of ranks can read.

Ranks of a tensor-parallel group hold slices of the heads, and those of a pipeline the layers of a stage; a group of one
kind must be able to read pages that a group of another has written. So a pool's page is stored as *objects*, each the
canonical page of some of its buffers:

    part "1of4"     the second quarter of the heads, of all buffers that are sliced by heads; its rank writes it
    part "shared"   all buffers that are not sliced; every rank holds the same, the rank of part 0 writes it

and where writers are stages, of the layers of one stage alone ("0of1-stage1of2").

A reader knows which share of the heads it holds and works out, for each number of slices that a writer may have had,
which objects cover that share: several whole objects of smaller slices, or one of a larger slice from which the reader
takes its piece. Where heads are fewer than ranks, several ranks hold the same part, and one of them writes it.

The digests of content tags are sums over logical coordinates, so those of a page's objects add up to the page's:

    digest(page) = digest("shared") + digest("0ofn") + ... + digest("n-1ofn")     (mod 2^64)

summed over stages, with each buffer counted once, since no buffer is in two kinds of objects. When a page is stored,
one of the two kinds is digested anew and the other's digest is the difference. So the producer's seal stays in force:
damage that came before stays visible. When a page is fetched, each object is checked as a whole, with its own digest,
before bytes are taken from it. A page made of whole objects then has the sum of their digests, which checks the copy as
well; a page cut out of larger objects is sealed anew, as it was cut from checked bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from twinpool.cache.memory.head_slices import common_heads, layer_pairs
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetLayout, PoolSetSpec, PoolSpec, overlap, packed
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.contracts.errors import ConfigError

PARTITIONS = (1, 2, 4, 8, 16)
"""The numbers of slices, as writers may have had them, that a reader looks for."""
STAGES = (1, 2, 3, 4, 6, 8)
"""The numbers of stages, as writers may have had them, that a reader looks for."""


@dataclass(frozen=True, slots=True, order=True)
class HeadPart:
    """The slice of the heads that an object holds: number `index` of `of` equal ones. `of` 0: the buffers without
    heads. Of them the layers of stage `stage` of `stages`."""

    index: int
    of: int
    stage: int = 0
    stages: int = 1

    def __str__(self) -> str:
        heads = f"{self.index}of{self.of}" if self.of else "shared"
        return heads if self.stages == 1 else f"{heads}-stage{self.stage}of{self.stages}"


@dataclass(frozen=True, slots=True)
class PageObjects:
    """The objects of one part, for some pages of one pool."""

    part: HeadPart
    payloads: torch.Tensor
    """uint8 [pages, object_bytes], contiguous."""
    digests: tuple[int, ...]
    """The digest of each object."""


@dataclass(frozen=True, slots=True)
class AssembledPage:
    """Pages put together from objects."""

    pages: torch.Tensor
    """uint8 [pages, unit_bytes], the reader's canonical pages."""
    digests: tuple[int, ...]
    damaged: Mapping[int, tuple[HeadPart, ...]]
    """Pages that are not to be used, by their row in `pages`, with the parts whose bytes don't match their digests
    (none where only the assembled page doesn't)."""


class ObjectSlicer:
    """Cuts one rank's pages into objects, and assembles its pages from objects of workers of any number of ranks.

    `spec` is the rank's own. Raises `ValueError` for buffers whose slice isn't one of equal parts of all heads.
    """

    def __init__(self, spec: PoolSetSpec) -> None:
        self.spec = spec
        self._layout = PoolSetLayout(spec, spec.even(1))
        self._own = {pool.name: _part_of(pool, spec) for pool in spec.pools}
        self._digester = cache(self._make_digester)

    def own(self, pool: str) -> tuple[HeadPart, ...]:
        """Returns the parts that make up this rank's page, the shared one first."""
        mine = self._own[pool]
        return tuple(part for part in (_shared_part(mine), mine) if self._buffers(pool, part))

    def object_bytes(self, pool: str, part: HeadPart) -> int:
        """Returns the payload size of an object of `part`."""
        return sum(b.layers * b.entry_bytes(self.spec.page_tokens) for b in self._buffers(pool, part))

    def plan(self, pool: str, of: int, stages: int = 1) -> tuple[HeadPart, ...]:
        """Returns the parts that cover this rank's page where writers had `of` slices, in `stages`; none where heads or
        layers don't divide so."""
        sliced = [b for b in self.spec.by_name[pool].buffers if b.heads]
        if any(b.heads % of for b in sliced):
            return ()
        try:
            for stage in range(stages):
                self.spec.whole.staged(stage, stages)
        except ConfigError:
            return ()
        own = self._own[pool]
        first, end = own.index * of // own.of, -(-(own.index + 1) * of // own.of)
        parts = []
        for stage in range(stages):
            sides = [HeadPart(0, 0, stage, stages), *(HeadPart(i, of, stage, stages) for i in range(first, end))]
            parts += [part for part in sides if self._holds_mine(pool, part)]
        return tuple(parts)

    def _holds_mine(self, pool: str, part: HeadPart) -> bool:
        """Whether an object of a part has any layer of this rank's page."""
        mine = {b.name: b.here for b in self.spec.by_name[pool].buffers}
        return any(overlap(b.here, mine[b.name]) for b in self._buffers(pool, part))

    def plans(self, pool: str, partitions: Iterable[int] = PARTITIONS) -> list[tuple[HeadPart, ...]]:
        """Returns every plan that covers this rank's page: for its own number of slices and for each of `partitions`,
        and for writers in as many stages as any of `STAGES`.

        The cheapest comes first: that of its own number, then by bytes and by number of objects to read.
        """
        own = self._own[pool]
        found = {self.plan(pool, of) for of in (own.of, *partitions)}
        found |= {self.plan(pool, 1, stages) for stages in (own.stages, *STAGES)} - {()}
        found -= {()}
        return sorted(found, key=lambda plan: (sum(self.object_bytes(pool, p) for p in plan), len(plan), plan))

    def split(
        self, pool: str, pages: torch.Tensor, digests: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[PageObjects]:
        """Cut this rank's canonical pages, uint8 [pages, unit_bytes], into the objects of the parts `own`.

        `digests` are the pages' digests, over positions `firsts[i] .. ends[i]-1` of each.
        """
        own = self.own(pool)
        if len(own) == 1:
            return [PageObjects(own[0], pages, tuple(digests))]
        out, left = [], list(digests)
        for part in own[:-1]:
            payloads = self._cut(pool, pages, part)
            found = self._digester(pool, part).digest_canonical(payloads, pool, firsts, ends)
            left = [_wrapped(d - f) for d, f in zip(left, found, strict=True)]
            out.append(PageObjects(part, payloads, tuple(found)))
        return [*out, PageObjects(own[-1], self._cut(pool, pages, own[-1]), tuple(left))]

    def assemble(
        self, pool: str, objects: Sequence[PageObjects], firsts: Sequence[int], ends: Sequence[int]
    ) -> AssembledPage:
        """Check the objects of a plan and assemble this rank's pages from them.

        `objects` are in the plan's order. Raises `ValueError` when they aren't those of a plan.
        """
        if tuple(o.part for o in objects) not in {self.plan(pool, o.part.of or 1, o.part.stages) for o in objects}:
            raise ValueError(f"{', '.join(str(o.part) for o in objects)} don't make up a page of {self._own[pool]}")
        damaged: dict[int, tuple[HeadPart, ...]] = {}
        for one in objects:
            found = self._digester(pool, one.part).digest_canonical(one.payloads, pool, firsts, ends)
            for page, (digest, want) in enumerate(zip(found, one.digests, strict=True)):
                if digest != want:
                    damaged[page] = (*damaged.get(page, ()), one.part)
        if len(objects) == 1 and objects[0].part in self.own(pool):
            return AssembledPage(objects[0].payloads, objects[0].digests, damaged)
        pages = torch.empty(len(firsts), self.spec.unit_bytes(pool), dtype=torch.uint8)
        for one in objects:
            self._paste(pool, pages, one)
        sealed = self._digester(pool, None).digest_canonical(pages, pool, firsts, ends)
        own = self._own[pool]
        if all(one.part.of % own.of == one.part.stages % own.stages == 0 for one in objects):
            sums = [_wrapped(sum(d)) for d in zip(*(one.digests for one in objects), strict=True)]
            for page, (digest, want) in enumerate(zip(sealed, sums, strict=True)):
                if digest != want:
                    damaged.setdefault(page, ())
            sealed = sums
        return AssembledPage(pages, tuple(sealed), damaged)

    def _cut(self, pool: str, pages: torch.Tensor, part: HeadPart) -> torch.Tensor:
        """Returns the bytes of a part that this rank's pages hold in whole: uint8 [pages, object_bytes]."""
        out = torch.empty(len(pages), self.object_bytes(pool, part), dtype=torch.uint8)
        for mine, theirs in self._views(pool, pages, part, out):
            theirs.copy_(mine)
        return out

    def _paste(self, pool: str, pages: torch.Tensor, one: PageObjects) -> None:
        for mine, theirs in self._views(pool, pages, one.part, one.payloads):
            mine.copy_(theirs)

    def _views(
        self, pool: str, pages: torch.Tensor, part: HeadPart, payloads: torch.Tensor
    ) -> Iterable[list[torch.Tensor]]:
        """Yields the heads and layers that pages and objects have in common, buffer by buffer: a view of the pages and
        one of the objects."""
        size = self.spec.page_tokens
        theirs = {b.spec.name: b for b in packed(self._buffers(pool, part), size)}
        for mine in packed(self.spec.by_name[pool].buffers, size):
            its = theirs.get(mine.spec.name)
            for one, other in zip(*layer_pairs([mine], [its]), strict=True) if its is not None else ():
                yield common_heads(one, pages.view(-1), len(pages), other, payloads.view(-1), len(payloads), size)

    def _buffers(self, pool: str, part: HeadPart) -> tuple[BufferSpec, ...]:
        """Returns the buffers, cut to their slice and layers, that an object of a part holds."""
        buffers = self.spec.whole.staged(part.stage, part.stages).by_name[pool].buffers
        if not part.of:
            return tuple(b for b in buffers if not b.heads)
        return tuple(_sliced(b, part) for b in buffers if b.heads)

    def _object_layout(self, pool: str, part: HeadPart) -> PoolSetLayout:
        """Returns the layout of a pool set in which `pool` has only the buffers of an object of `part`."""
        pools = tuple(
            dataclasses.replace(p, buffers=self._buffers(pool, part)) if p.name == pool else p for p in self.spec.pools
        )
        return PoolSetLayout(PoolSetSpec(self.spec.page_tokens, pools), self._layout.counts)

    def _make_digester(self, pool: str, part: HeadPart | None) -> PageDigester:
        return PageDigester(self._layout if part is None else self._object_layout(pool, part), only=pool)


def _sliced(buffer: BufferSpec, part: HeadPart) -> BufferSpec:
    count = buffer.heads // part.of
    return dataclasses.replace(buffer, shape=(count, *buffer.shape[1:]), first_head=count * part.index)


def _shared_part(part: HeadPart) -> HeadPart:
    """The part of the buffers without heads, of the same stage."""
    return HeadPart(0, 0, part.stage, part.stages)


def _part_of(pool: PoolSpec, spec: PoolSetSpec) -> HeadPart:
    """Returns the part that a rank's pool holds: 0of1 where no buffer is sliced by heads."""
    parts = set()
    for buffer in pool.buffers:
        if buffer.heads:
            here = buffer.shape[0]
            if buffer.heads % here or buffer.first_head % here:
                raise ValueError(
                    f"{pool.name}: heads {buffer.first_head}..{buffer.first_head + here - 1} of {buffer.heads} of "
                    f"{buffer.name} aren't one of equal parts"
                )
            parts.add(HeadPart(buffer.first_head // here, buffer.heads // here, spec.stage, spec.stages))
    if len(parts) > 1:
        raise ValueError(
            f"{pool.name}: its buffers are different parts of their heads ({', '.join(map(str, sorted(parts)))}); "
            "buffers that are sliced differently belong in different pools"
        )
    return parts.pop() if parts else HeadPart(0, 1, spec.stage, spec.stages)


def _wrapped(digest: int) -> int:
    return digest & 0xFFFFFFFFFFFFFFFF
