"""What the leader of a worker's ranks tells the others to do: frozen values, an explicit tag for each, msgpack.

A worker of several tensor-parallel ranks decides in one place, the process of rank 0, the *leader*. It alone plans,
hands out pages and slots, and talks to routers and peers. The other ranks, the *followers*, hold their heads' share of
every page under the same index, and carry out the leader's orders one by one, in the order in which the leader carried
out its own part of them. An order that asks for something is answered with plain values; what can't be carried out ends
the follower, and with it the worker.

Nothing but the types in `TAGS` can come out of bytes; anything else raises `WireError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

PageIndices = tuple[int, ...]


class PageSpan(NamedTuple):
    """One pool's share of a copy: `sources[i]` goes to `targets[i]`."""

    pool: str
    sources: PageIndices
    targets: PageIndices


class PagePlaces(NamedTuple):
    """Pages (or states) `first ..` of a sequence in one pool, and the pages or slots that hold them."""

    pool: str
    first: int
    indices: PageIndices


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class ZeroPages:
    """Clear these pages and slots of the pools in `place`."""

    place: str
    chosen: tuple[tuple[str, PageIndices], ...]


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy pages and slots between the pools of two places, all buffers."""

    source: str
    target: str
    pieces: tuple[PageSpan, ...]
    layers: tuple[int, int] | None
    """Half-open; None: all layers."""


@dataclass(frozen=True, slots=True)
class DigestPages:
    """Answer with the digests of positions `firsts[i] .. ends[i]-1`, a list for each group of the pool's buffers."""

    place: str
    pool: str
    indices: PageIndices
    firsts: PageIndices
    ends: PageIndices


@dataclass(frozen=True, slots=True)
class CheckPages:
    """Answer with the broken invariants of the pools in `place`."""

    place: str


@dataclass(frozen=True, slots=True)
class BindArenas:
    """Answer with the bond of this rank's arena, empty where it has none, and with how many copies into it were carried
    out since this was last asked. With `bond`, forget what is in it first, and take that one."""

    bond: bytes


# ---------------------------------------------------------------- steps


class RowOrder(NamedTuple):
    """One sequence's part of a step, as the engine's own `BatchRow` has it."""

    start: int
    tokens: int
    """How many."""
    tables: tuple[PagePlaces, ...]
    """Its tables, by pool."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute one step together with the other ranks. Its tokens, and whose state must not be written, are told by the
    leader within the step: it need not know them yet."""

    rows: tuple[RowOrder, ...]


# ---------------------------------------------------------------- hand-over


@dataclass(frozen=True, slots=True)
class DescribeMemory:
    """Answer with this rank's part of the plane's descriptor."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open link `link` to a reader; answer with an empty string, or with why it can't be reached."""

    link: int
    descriptor: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloseLink:
    link: int


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write these places of mine to the reader's of the same numbers; answer when it is done."""

    link: int
    room: str
    ticket: int
    """The grant's."""
    number: int
    """Which write of its room this is, from 1."""
    sources: tuple[PagePlaces, ...]
    targets: tuple[PagePlaces, ...]


@dataclass(frozen=True, slots=True)
class PermitRoom:
    """Writes for this room may arrive from now on; answered, since nothing may arrive before."""

    room: str
    ticket: int
    """The grant's."""
    places: tuple[PagePlaces, ...]


@dataclass(frozen=True, slots=True)
class RevokeRoom:
    room: str


# ---------------------------------------------------------------- storage


class StoredPage(NamedTuple):
    """A page in host memory, with its block hash and the positions that its digest is over."""

    pool: str
    key: bytes
    at: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class FindPages:
    """Answer, when storage has, with one truth for each pool and block hash: whether this rank's part is there."""

    wanted: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Read this rank's part of pages into host memory; answer, when it is there, with verdict, digests and reason."""

    pages: tuple[StoredPage, ...]


@dataclass(frozen=True, slots=True)
class PutPages:
    """Store this rank's part of pages in host memory; answer, when it is done, with verdict, digest and reason.

    Of one `chain` (0: none) no page without those that were ordered before it."""

    pages: tuple[StoredPage, ...]
    chain: int


# ---------------------------------------------------------------- life


@dataclass(frozen=True, slots=True)
class FormGroup:
    """The first order: meet the other ranks through the store in this file, and watch this process, your leader."""

    store: str
    pid: int
    started: int
    namespace: str


@dataclass(frozen=True, slots=True)
class AwaitReady:
    """Answer when everything is loaded."""


@dataclass(frozen=True, slots=True)
class EndRank:
    """The worker ends."""

    reason: str


class WriteArrived(NamedTuple):
    """Told by a follower of its own accord: it has taken in writes up to `number` of a room from a writer's rank."""

    room: str
    source: int
    number: int


class LinkLost(NamedTuple):
    """Told by a follower of its own accord: the connection of its link was cut, and what it wrote may be lost."""

    link: int


FollowerNotice = WriteArrived | LinkLost
"""What followers tell without being asked."""

Order = (
    ZeroPages
    | CopyPages
    | DigestPages
    | CheckPages
    | BindArenas
    | RunStep
    | DescribeMemory
    | OpenLink
    | CloseLink
    | PostWrite
    | PermitRoom
    | RevokeRoom
    | FindPages
    | FetchPages
    | PutPages
    | FormGroup
    | AwaitReady
    | EndRank
)
