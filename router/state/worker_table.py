"""The workers as the router knows them, and which one a request goes to.

The choice is one expression a role: prefill takes the worker with the least work in front of the first token
(prompt tokens in flight plus those of this prompt that it probably doesn't hold yet), decode the one with the fewest
sequences. What a worker holds is guessed from what was sent to it: a bounded memory of prefix hashes that dies with
the worker's incarnation, as its cache does, unless the next one says that it has taken over its host memory.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.config.router_config import RouterConfig
from contracts.ids import Incarnation, RequestId, Role, WorkerName
from contracts.messages.fingerprint import binding_class
from contracts.messages.router_commands import PeerRef
from contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from router.state.circuit_breaker import CircuitBreaker

WorkerKey = tuple[WorkerName, Incarnation]
"""One life of one worker."""

PREFIX_BLOCK_TOKENS = 64
PREFIX_BLOCKS_REMEMBERED = 65_536
"""A worker; at 64 tokens a block that is 4 M positions. A block takes about 160 bytes."""
PREFIX_BLOCKS_IN_ALL = 4 * 1024**2
"""Of all workers together: where there are more than 64, each has its share."""

LEAVE_ANSWER_S = 10.0
"""A worker that was told to leave and still serves after so long has not heard of it."""

NOTHING_ASKED: tuple[Sequence[bytes], int] = ((b"",), 0)

GONE = frozenset({"left", "dead"})


def prefix_hashes(tokens: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    """Block hashes of the whole blocks of `tokens`: equal keys mean equal prefixes (and equal salts)."""
    raw = array("I", tokens).tobytes()
    width = PREFIX_BLOCK_TOKENS * array("I").itemsize
    key = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    keys = []
    for end in range(width, len(raw) + 1, width):
        key = hashlib.blake2b(raw[end - width : end], digest_size=8, key=key).digest()
        keys.append(key)
    return tuple(keys)


@dataclass(slots=True)
class WorkerEntry:
    """One incarnation of one worker."""

    record: WorkerRecord
    status: WorkerStatus
    breaker: CircuitBreaker
    linked: bool = False
    refuses_until: float = 0.0
    """It said that it is draining before the view did."""
    leaves_until: float = 0.0
    """An operator has told it to leave: until then nobody counts on it, whether it has answered or not."""
    drains: bool = False
    """It has answered that it drains, and nobody has told it to stay since. A view may still show what was before."""
    load: int = 0
    """Prefill: prompt tokens in flight. Decode: sequences in flight."""
    turn: int = 0
    """When it was last chosen; ties go to the one that has waited longest."""
    requests: set[RequestId] = field(default_factory=set)
    prefixes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    before: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """What its last incarnation was sent, until this one has said whether it took that over."""
    blocks_at_most: int = PREFIX_BLOCKS_REMEMBERED
    last_asked: tuple[Sequence[bytes], int] = NOTHING_ASKED
    """The prefix keys that were looked for last, and what was found: all choices of a prompt have the same."""

    @property
    def key(self) -> WorkerKey:
        return (self.record.name, self.record.incarnation)

    @property
    def numerics(self) -> str:
        """The numerics class that what it computes belongs to; empty where any will do (``fast``)."""
        return binding_class(self.record.fingerprint)

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.record.name, self.record.incarnation, self.record.control)

    def serves(self, now: float) -> bool:
        return self.linked and self.status.state == "ready" and now >= self.refuses_until

    def stays(self, now: float) -> bool:
        """Whether it serves and will go on to, as far as is known."""
        return self.serves(now) and now >= self.leaves_until

    def tell_to_leave(self, now: float) -> None:
        """An operator tells it so, and its answer may take a while."""
        self.leaves_until = now + LEAVE_ANSWER_S

    def tell_to_stay(self) -> None:
        """An operator has changed his mind, or it can't leave."""
        self.leaves_until, self.drains = 0.0, False

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """How many leading tokens this worker has probably seen."""
        if hashes is self.last_asked[0]:  # another choice of the same prompt
            return self.last_asked[1]
        # Whoever remembers a chain's tail remembers its head (see `remember`), so the first gap is found by halving:
        # of a 128k prompt there are 2,000 keys, and hundreds of workers to ask.
        blocks = bisect_left(hashes, True, key=lambda key: key not in self.prefixes)
        self.last_asked = (hashes, blocks * PREFIX_BLOCK_TOKENS)
        return self.last_asked[1]

    def take_over(self) -> None:
        """Count on what the last incarnation was sent, if this one says that it found its pages on the host."""
        if self.before and self.status.counters.get("arena_pages_adopted", 0) > 0:
            older = [key for key in self.before if key not in self.prefixes]
            self.prefixes = OrderedDict.fromkeys([*older, *self.prefixes])
            self.before = OrderedDict()
            self.last_asked = NOTHING_ASKED

    def remember(self, hashes: Sequence[bytes]) -> None:
        if (
            hashes is self.last_asked[0]
            and self.last_asked[1] == len(hashes) * PREFIX_BLOCK_TOKENS
            and (not hashes or next(reversed(self.prefixes)) == hashes[0])
        ):  # the youngest already
            return
        self.last_asked = NOTHING_ASKED
        # Deepest first, so that a chain's head is younger than its tail and outlives it, always.
        for key in reversed(hashes):
            self.prefixes[key] = None
            self.prefixes.move_to_end(key)
        while len(self.prefixes) > self.blocks_at_most:
            self.prefixes.popitem(last=False)


class WorkerTable:
    """The table: one entry a worker, its current incarnation only."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._entries: dict[WorkerName, WorkerEntry] = {}
        self._turn = 0

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def get(self, key: WorkerKey) -> WorkerEntry | None:
        entry = self._entries.get(key[0])
        return entry if entry is not None and entry.record.incarnation == key[1] else None

    def named(self, name: str) -> WorkerEntry | None:
        return self._entries.get(WorkerName(name))

    def update(self, views: Iterable[WorkerView]) -> list[WorkerEntry]:
        """Take the controller's table; returns the entries whose incarnation has ended."""
        lost: list[WorkerEntry] = []
        seen = set()
        for view in views:
            name, incarnation = view.record.name, view.record.incarnation
            seen.add(name)
            old = self._entries.get(name)
            if old is not None and old.record.incarnation > incarnation:
                continue  # an older table than what we know
            if old is not None and old.record.incarnation == incarnation:
                was_gone = old.status.state in GONE
                old.record, old.status = view.record, view.status
                old.take_over()
                if view.status.state in GONE and not was_gone:
                    lost.append(old)
                continue
            entry = WorkerEntry(view.record, view.status, CircuitBreaker(self._config))
            if old is not None:
                lost.append(old)
                entry.before = old.prefixes or old.before
                entry.take_over()
            self._entries[name] = entry
        for name in [n for n in self._entries if n not in seen]:
            lost.append(self._entries.pop(name))
        share = min(PREFIX_BLOCKS_REMEMBERED, PREFIX_BLOCKS_IN_ALL // max(1, len(self._entries)))
        for entry in self._entries.values():
            entry.blocks_at_most = share
        return lost

    def failed(self, key: WorkerKey, request: RequestId, now: float, reporter: WorkerKey) -> None:
        """An attempt failed, and `key` is at fault, as `reporter` says."""
        guilty, witness = self.get(key), self.get(reporter)
        if guilty is not None:
            guilty.breaker.failed(request, now)
        if witness is not None and reporter != key:
            witness.breaker.complained(key[0], now)

    def succeeded(self, keys: Iterable[WorkerKey | None], request: RequestId, now: float) -> None:
        for entry in [self.get(key) for key in keys if key]:
            if entry is not None:
                entry.breaker.succeeded(request, now)

    def gone(self, entry: WorkerEntry) -> None:
        """Its incarnation has ended: who complained about it was right."""
        entry.breaker.over()
        for other in self:
            other.breaker.justified(entry.record.name)

    def left_alone(self, now: float) -> list[WorkerName]:
        """Those whose breakers keep requests from them."""
        return [e.record.name for e in self if e.serves(now) and not e.breaker.admits(now)]

    def others_like(self, key: WorkerKey) -> bool:
        """Whether there is another worker of this one's role, up or coming back."""
        entry = self.get(key)
        role = entry.record.role if entry is not None else None
        return any(e.record.role is role and e.record.name != key[0] and e.status.state != "left" for e in self)

    def staying(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.stays(now)]

    def serving(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.serves(now)]

    def most_positions(self, role: Role) -> int | None:
        """The longest sequence that any worker of `role` can hold; None while none is known.

        A worker that is starting has not told yet what fits (0): requests wait for it.
        """
        known = (e.record.fits.max_positions for e in self if e.record.role is role and e.status.state not in GONE)
        return max(filter(None, known), default=None)

    def classes(self, role: Role, need: int, avoid: Mapping[WorkerKey, float], now: float) -> set[str]:
        """The numerics classes of those that could take a request of `need` positions now."""
        return {e.numerics for e in self.able(role, need, avoid, now)}

    def unlike(self, now: float) -> str:
        """Why no prefill and no decode worker can serve a request together, where that is for their classes."""
        prefill, decode = (self.serving(role, now) for role in (Role.PREFILL, Role.DECODE))
        if not prefill or not decode or {e.numerics for e in prefill} & {e.numerics for e in decode}:
            return ""
        return (
            f"no prefill and decode worker compute alike: {prefill[0].record.name} is of the numerics class "
            f"{prefill[0].numerics}, {decode[0].record.name} of {decode[0].numerics}; set engine.numerics_class to a "
            "level that every machine runs, and one build everywhere"
        )

    def pick_prefill(
        self,
        length: int,
        max_len: int,
        hashes: Sequence[bytes],
        avoid: Mapping[WorkerKey, float],
        now: float,
        classes: Container[str] | None = None,
    ) -> WorkerEntry | None:
        """`classes`: the numerics classes to choose from; None: all."""

        def cost(e: WorkerEntry) -> tuple[int, int, int]:
            uncached = length - e.cached_tokens(hashes)
            return (e.load + uncached, uncached, e.turn)

        return self._pick(Role.PREFILL, max_len, avoid, now, cost, classes)

    def pick_decode(
        self,
        max_len: int,
        avoid: Mapping[WorkerKey, float],
        now: float,
        spoiled: Container[WorkerKey] = (),
        classes: Container[str] | None = None,
    ) -> WorkerEntry | None:
        """`spoiled`: those to which the chosen prefill worker could not hand it over before; the last choice. `classes`
        as for `pick_prefill`."""
        return self._pick(Role.DECODE, max_len, avoid, now, lambda e: (e.key in spoiled, e.load, e.turn), classes)

    def _pick(
        self,
        role: Role,
        need: int,
        avoid: Mapping[WorkerKey, float],
        now: float,
        cost: Callable[[WorkerEntry], tuple[int, ...]],
        classes: Container[str] | None,
    ) -> WorkerEntry | None:
        able = [e for e in self.able(role, need, avoid, now) if classes is None or e.numerics in classes]
        if not able:
            return None
        entry = min(able, key=cost)
        self._turn += 1
        entry.turn = self._turn
        return entry

    def able(self, role: Role, need: int, avoid: Mapping[WorkerKey, float], now: float) -> list[WorkerEntry]:
        """Who could take a request of `need` positions now."""
        return [
            e
            for e in self._entries.values()
            if e.record.role is role
            and e.serves(now)
            and e.breaker.admits(now)
            and e.record.fits.max_positions >= need
            and avoid.get(e.key, 0.0) <= now
        ]
