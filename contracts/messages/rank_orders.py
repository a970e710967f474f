"""Rank orders: what the leader of a worker's ranks tells the followers to do, as frozen values.

A worker of several tensor-parallel ranks decides in one place, the process of rank 0, the *leader*. It alone plans,
hands out pages and slots, and talks to routers and peers. The other ranks, the *followers*, hold their heads' share of
every page under the same index, and carry out the leader's orders one by one, in the order in which the leader carried
out its own part of them. An order that asks for something is answered with plain values; a follower that can't
carry out an order ends, and with it the worker.

`contracts/messages/rank_order_codec.py` turns orders into bytes and back.
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
    """Pages (or states) of a sequence in one pool: page or slot `indices[i]` holds page number
    `first + i`."""

    pool: str
    first: int
    indices: PageIndices


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class ZeroPages:
    """Fill pages and slots of the pools in `place` with zeros; `chosen` has pairs of a pool and its indices."""

    place: str
    chosen: tuple[tuple[str, PageIndices], ...]


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy pages and slots between the pools of two places, all buffers."""

    source: str
    target: str
    pieces: tuple[PageSpan, ...]
    layers: tuple[int, int] | None
    """First layer and end, half-open; None: all layers."""


@dataclass(frozen=True, slots=True)
class DigestPages:
    """Answer with digests of pages, one list for each group of the pool's buffers.

    Entry `i` of a list is over positions `firsts[i] .. ends[i]-1` of page `indices[i]`.
    """

    place: str
    pool: str
    indices: PageIndices
    firsts: PageIndices
    ends: PageIndices


@dataclass(frozen=True, slots=True)
class CheckPages:
    """Answer with the broken invariants of the pools in `place`, a line of text each."""

    place: str


@dataclass(frozen=True, slots=True)
class BindArenas:
    """Answer with the bond of this rank's arena, empty where it has none, and with the number of copies into the arena
    since the last such order. With a `bond` that isn't empty, clear the arena first and give it that bond.

    Ranks with equal bonds have arenas that belong together: one incarnation wrote them."""

    bond: bytes


# ---------------------------------------------------------------- steps


class TableEntries(NamedTuple):
    """Entries of a sequence's block table that followers don't have yet: those of row `row` of a pool's tables, from
    page number `first` on."""

    pool: str
    row: int
    first: int
    indices: PageIndices


class TablePlace(NamedTuple):
    """The block table of a sequence in one pool: row `row`, read from page number `first` on up to `stop`. Of a state
    pool `row` is the slot."""

    pool: str
    row: int
    first: int
    stop: int


class RowOrder(NamedTuple):
    """One sequence's part of a step, as the engine's own `BatchRow` has it."""

    start: int
    tokens: int
    """The number of tokens."""
    tables: tuple[TablePlace, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute one step together with the other ranks. The leader sends the step's tokens, and which rows' state must
    not be written, within the step, as it need not know them yet when it gives this order."""

    rows: tuple[RowOrder, ...]
    entries: tuple[TableEntries, ...]
    """What was appended to block tables since the step before."""


class LayerCount(NamedTuple):
    """So many layers of a pool, from the first on."""

    pool: str
    layers: int


@dataclass(frozen=True, slots=True)
class MarkStep:
    """The next step is to say how far it has come: it is step `step` of those that do, counted from 1, and reaches a
    mark once the layers of each of `groups` are written."""

    step: int
    groups: tuple[tuple[LayerCount, ...], ...]


# ---------------------------------------------------------------- hand-over


class LayerSpan(NamedTuple):
    """Layers of a pool: `first .. stop-1`."""

    pool: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class DescribeMemory:
    """Answer with this rank's part of the data plane's descriptor for the writer `peer`."""

    peer: str = ""


@dataclass(frozen=True, slots=True)
class SeverPeer:
    """End all access of the writer `peer` to this rank's memory; answered when that is done."""

    peer: str


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open write link `link` to a reader; answer with an empty string, or with why the reader can't be reached."""

    link: int
    descriptor: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloseLink:
    link: int


@dataclass(frozen=True, slots=True)
class SeverLink:
    """End the writes that are under way on write link `link`, as far as they can be: they are answered soon after."""

    link: int


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write this rank's pages and slots in `sources` to the reader's in `targets` of the same page numbers; answer when
    the write is done.

    It comes after all orders before it or, with a `step`, after that step's mark alone."""

    link: int
    room: str
    ticket: int
    """The grant's."""
    number: int
    """Which write of its room this is, from 1."""
    sources: tuple[PagePlaces, ...]
    targets: tuple[PagePlaces, ...]
    layers: tuple[LayerSpan, ...] = ()
    """The layers that are written, one for each pool; without any: all layers."""
    step: int = 0
    """The step that writes these layers, as `MarkStep` counts; 0: none."""
    group: int = 0
    """The mark of that step, from 0."""


@dataclass(frozen=True, slots=True)
class PermitRoom:
    """Permit writes for this room into `places`; answered, as no write may arrive before the permit."""

    room: str
    ticket: int
    """The grant's."""
    places: tuple[PagePlaces, ...]


@dataclass(frozen=True, slots=True)
class RevokeRoom:
    room: str


# ---------------------------------------------------------------- storage


class StoredPage(NamedTuple):
    """A page in host memory: its pool, its block hash `key`, its index `at`, and the positions `first .. end-1` that
    its digest is over."""

    pool: str
    key: bytes
    at: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class FindPages:
    """Answer, once storage has answered, with one boolean for each pair of pool and block hash: whether storage has
    this rank's part."""

    wanted: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Read this rank's part of pages into host memory; answer, when that is done, with verdict, digests and reason."""

    pages: tuple[StoredPage, ...]


@dataclass(frozen=True, slots=True)
class PutPages:
    """Store this rank's part of pages in host memory; answer, when it is done, with verdict, digest and reason.

    No page of a `chain` (0: none) is stored without the pages of that chain that were ordered before it."""

    pages: tuple[StoredPage, ...]
    chain: int


# ---------------------------------------------------------------- life


@dataclass(frozen=True, slots=True)
class FormGroup:
    """The first order: meet the other ranks through the store in file `store`, and watch the leader's process; or, of a
    worker on several hosts, connect to the `endpoints` of all ranks, and watch the connection to the leader's.

    `pid`, `started` (start ticks) and `namespace` name that process.
    """

    store: str
    pid: int
    started: int
    namespace: str
    endpoints: tuple[str, ...] = ()
    """Where each rank takes what the others send within a step; none where all are on one host."""


@dataclass(frozen=True, slots=True)
class AwaitReady:
    """Answer, with the digest of the weights, when this rank has loaded everything."""


@dataclass(frozen=True, slots=True)
class LeaveRole:
    """Close all that this rank has for the worker, which has left its role, and answer then. The next order is for the
    parts of the worker as which the process goes on."""


@dataclass(frozen=True, slots=True)
class EndRank:
    """End this rank: the worker ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class BeginStep:
    """To data-parallel ranks, which carry out no other order: their group's step `number` has begun."""

    number: int


@dataclass(frozen=True, slots=True)
class ServeExperts:
    """Take part, without rows, in a step of the workers that the ranks' worker shares its experts with."""


class StepBegun(NamedTuple):
    """Notice of a data-parallel rank: it has begun step `number` of its group."""

    number: int


class WriteArrived(NamedTuple):
    """Notice: the follower has taken in the writes up to `number` of a room from the writer's rank `source`."""

    room: str
    source: int
    number: int


class LinkLost(NamedTuple):
    """Notice: the connection of the follower's write link `link` was cut; what it wrote there may be lost."""

    link: int


FollowerNotice = WriteArrived | LinkLost | StepBegun
"""A message that a follower sends without being asked."""

Order = (
    ZeroPages
    | CopyPages
    | DigestPages
    | CheckPages
    | BindArenas
    | RunStep
    | MarkStep
    | DescribeMemory
    | SeverPeer
    | OpenLink
    | CloseLink
    | SeverLink
    | PostWrite
    | PermitRoom
    | RevokeRoom
    | FindPages
    | FetchPages
    | PutPages
    | FormGroup
    | AwaitReady
    | LeaveRole
    | EndRank
    | BeginStep
    | ServeExperts
)
