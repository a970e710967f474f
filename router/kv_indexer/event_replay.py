"""Replay of KV events: keeps an index equal to what a publisher of KV events holds, or says that it can't.

Messages get lost: a subscriber joins late, a queue overflows, a connection breaks, the publisher dies and a new one
counts from 0 again. Sequence numbers alone show a gap, but not that a new publisher happens to be where the old one
was. So the reader keeps a digest of the last batch, and **every question on the replay socket starts at the last batch
that was applied**. The answer must begin with that very batch (its timestamp makes it unlike any of another publisher):

    the answer begins with the same batch      nothing was lost but what follows in the answer
    it begins later                            the loss is older than the publisher's buffer
    it begins with another batch, or is empty  this is a new publisher: forget everything, ask from 0

A question is asked at a gap, at a batch that doesn't fit, and when the connection broke, since the batches may fit by
chance. Meanwhile live batches are held back, and applied after the answer. A publisher answers with all that it sent
before: so a batch that came before the question and lies behind the answer's end is from a publisher that is gone, and
is dropped. When the connection breaks while a question is open, the answer may be a dead publisher's: the question is
asked again.

When batches are lost for good, the index is emptied, `complete` becomes False, and the reader asks for the publisher's
whole content (`contracts.messages.kv_events.TRUTH`). That answer begins with the last batch as well, since the next
question has to start at one. Without an answer the reader goes on with the batches that follow: the index then holds
less than the publisher, never more than the events say. It is complete again when the publisher clears everything, or
starts anew.

This is the logic, without I/O; `KVEventSubscriber` (router/kv_indexer/kv_event_subscriber.py) has the sockets.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.kv_events import (
    TRUTH,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventMedium,
    KvEvent,
    decode_batch,
)


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """The index's entry of a page: the hash of its parent (None: it begins a sequence) and its token ids."""

    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(slots=True)
class KVIndex:
    """The pages of each tier, by block hash."""

    pages: dict[EventMedium, dict[bytes, BlockEntry]] = field(
        default_factory=lambda: {tier: {} for tier in EventMedium}
    )

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Apply events in order; applying some of them again changes nothing."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for page in event.hashes:
                        self.pages[event.tier].pop(page, None)
                case AllBlocksCleared():
                    self.clear(event.tier)

    def clear(self, tier: EventMedium | None = None) -> None:
        """Forget the pages of one tier; None: of all."""
        for one in EventMedium if tier is None else (tier,):
            self.pages[one].clear()

    def _store(self, event: BlockStored) -> None:
        parent, step = event.parent, event.page_tokens
        for i, page in enumerate(event.hashes):
            self.pages[event.tier][page] = BlockEntry(parent, event.tokens[i * step : (i + 1) * step])
            parent = page


_RECENT = 4096
"""Applied batches whose digests are remembered, to tell a duplicate from another publisher's batch."""
_HELD = 4096
"""Live batches held back during a question; the oldest overflow, and are asked for again."""
_TRIES = 3
"""Questions in a row that bring nothing new before a loss is accepted, until the connection breaks."""


class EventIndex(Protocol):
    """What the events of one publisher are applied to."""

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Apply events in order; applying some of them again changes nothing."""

    def clear(self) -> None:
        """Forget everything."""


class KVEventReplay:
    """The reader's logic for one publisher: live batches and answers go in, the index and the next question come out.

    `can_ask`: whether there is a replay socket. `question`: the frame that is to be asked, or has been and isn't
    answered yet (8 bytes of a sequence number, or `TRUTH`); None: none. `into`: what the events are applied to in the
    place of `index`, which stays empty then.
    """

    def __init__(self, can_ask: bool, into: EventIndex | None = None) -> None:
        self.index = KVIndex()
        self._into: EventIndex = self.index if into is None else into
        self._whole = False
        self.lost = self.damaged = self.restarts = 0
        self._can_ask = can_ask
        self.question: bytes | None = bytes(8) if can_ask else None
        self._last: tuple[int, bytes | None] | None = None
        """The sequence number of the last batch accounted for, and its digest (None where it isn't known)."""
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._early: dict[int, bytes] = {}
        """Batches held back when the question was sent: those that the answer doesn't reach are another publisher's."""
        self._doubt = False
        """Whether the connection broke, so that a batch that fits may be another publisher's."""
        self._broke = False
        """Whether the connection broke since the question was sent, so that the answer may be a dead publisher's."""
        self._wants_truth = False
        self._untold = 0
        """Questions for the whole content in a row that got no answer."""
        self._tries = 1 if can_ask else 0
        self._answers = 0
        self._again = False
        """Whether the rest of this answer is another publisher's, which is to be asked from 0."""
        self._truth: list[tuple[int, bytes]] = []
        """The parts of the answer to the question for the whole content."""

    @property
    def complete(self) -> bool:
        """Whether the index is all that the publisher held when it sent the last batch that arrived here."""
        return self._whole and not self._doubt and self.question is None

    @property
    def next(self) -> int:
        """The sequence number of the batch that fits next."""
        return 0 if self._last is None else self._last[0] + 1

    def live(self, seq: int, payload: bytes) -> None:
        """Take in a batch from the subscription."""
        if self.question is None and not self._doubt:
            if seq == self.next:
                self._take(seq, payload)
                return self._settle()
            if self._recent.get(seq) == _digest(payload):
                return
        self._held[seq] = payload
        if len(self._held) > _HELD:
            self._held.popitem(last=False)
        if self.question is None:
            self._ask()

    def disconnected(self) -> None:
        """Note that the connection to the publisher broke; a batch that arrives later may still be from before."""
        self._doubt = True
        self._held.clear()
        self._broke = self.question is not None
        self._wants_truth, self._untold = self._can_ask and not self._whole, 0
        if self._can_ask and self.question is None:
            self._ask()

    def asked(self) -> None:
        """Note that `question` is sent now. All batches that have arrived must have been given to `live` before."""
        self._early, self._broke = dict(self._held), False

    def answer(self, seq: int, payload: bytes) -> None:
        """Take in a batch of the answer to `question`."""
        first, self._answers = self._answers == 0, self._answers + 1
        if self.question == TRUTH:
            self._truth.append((seq, payload))
        elif self._again or (seq < self.next and not first):
            return
        elif first and self._last is not None:
            if seq > self._last[0]:
                self._give_up(seq - 1)
                self._take(seq, payload)
            elif self._last[1] not in (None, _digest(payload)):
                self._new_publisher()
                self._again = True
        else:
            if seq != self.next:
                self._give_up(seq - 1)
            self._take(seq, payload)

    def answered(self) -> None:
        """Take in the end of the answer."""
        question, self.question, answers = self.question, None, self._answers
        told = True
        if question == TRUTH:
            told = self._adopt()
            self._doubt = self._broke if told else self._doubt
        elif answers == 0 and self._last is not None:
            self._new_publisher()
            self._again = True
        else:
            self._doubt = self._broke
            self._whole = self._whole or answers == 0
        if self._again:
            self._pose(bytes(8))
        elif self._doubt:
            self._tries = 0
            self._ask()
        else:
            if told:
                self._drop_strangers()
            self._catch_up()

    def unanswered(self) -> None:
        """Note that the answer did not come in time, or broke off."""
        question, self.question = self.question, None
        if question == TRUTH:
            self._untold += 1
            self._wants_truth = self._untold < _TRIES
        if question == TRUTH and not self._doubt:
            self._catch_up()
        else:
            self._doubt = True
            self._ask()

    def _drop_strangers(self) -> None:
        """Drop the batches that the answer should have reached, and didn't: their publisher is gone."""
        for seq, payload in self._early.items():
            if seq >= self.next and self._held.get(seq) == payload:
                del self._held[seq]

    def _catch_up(self) -> None:
        """Apply the batches held back; ask again where one still doesn't fit."""
        for seq in sorted(self._held):
            if seq > self.next:
                return self._ask()
            payload = self._held.pop(seq)
            if seq == self.next:
                self._take(seq, payload)
        self._tries = 0
        self._settle()

    def _ask(self) -> None:
        """Ask from the last batch on; once tried often enough, accept the loss and apply the batches held back."""
        if self._can_ask and self._tries < _TRIES:
            self._tries += 1
            self._pose((0 if self._last is None else self._last[0]).to_bytes(8, "big"))
            return
        self._tries = 0
        for seq, payload in sorted(self._held.items()):
            if seq < self.next:
                self._new_publisher()
            if seq != self.next or self._doubt:
                self._give_up(seq - 1)
            self._doubt = False
            self._take(seq, payload)
        self._held.clear()
        self._settle()

    def _settle(self) -> None:
        """Ask for the whole content, where that is wanted and no other question is open."""
        if self._wants_truth and self.question is None:
            self._wants_truth = False
            if not self._whole:
                self._pose(TRUTH)

    def _pose(self, question: bytes) -> None:
        self.question, self._answers, self._again = question, 0, False
        self._early, self._truth = {}, []

    def _take(self, seq: int, payload: bytes) -> None:
        """Apply the batch that is next; one that can't be read counts as lost."""
        try:
            batch = decode_batch(payload)
        except WireError:
            self.damaged += 1
            self._give_up(seq)
            self._last = (seq, _digest(payload))
            return
        self._into.apply(batch.events)
        self._whole = self._whole or seq == 0 or AllBlocksCleared() in batch.events
        self._last = (seq, _digest(payload))
        self._recent[seq] = _digest(payload)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def _adopt(self) -> bool:
        """Make the answer for the whole content the index; returns False where the answer isn't whole or can't be read.

        The answer is the last batch, unless there was none, then the content in pieces that carry the next number.
        """
        answer, digest = self._truth, None
        if len(answer) > 1 and answer[1][0] == answer[0][0] + 1:
            digest, answer = _digest(answer[0][1]), answer[1:]
        if not answer or any(seq != answer[0][0] for seq, _ in answer) or bool(answer[0][0]) != (digest is not None):
            return False
        try:
            batches = [decode_batch(payload) for _, payload in answer]
        except WireError:
            self.damaged += 1
            return False
        self._into.clear()
        for batch in batches:
            self._into.apply(batch.events)
        self._whole = True
        self._last = (answer[0][0] - 1, digest) if digest is not None else None
        self._recent.clear()
        return True

    def _new_publisher(self) -> None:
        self.restarts += 1
        self._forget()
        self._last, self._wants_truth = None, False

    def _give_up(self, through: int) -> None:
        """Count all batches up to `through` as lost: empty the index, and want the whole content."""
        self.lost += 1
        self._forget()
        self._last, self._wants_truth, self._untold = (through, None), self._can_ask, 0

    def _forget(self) -> None:
        self._into.clear()
        self._recent.clear()
        self._whole = False


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
