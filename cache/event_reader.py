"""Follows a publisher of KV events and keeps an index equal to what it holds, or says that it can't.

Messages get lost: a subscriber joins late, a queue overflows, a connection breaks, the publisher dies and a new one
counts from 0 again. The sequence number alone shows a gap, but not that a new publisher happens to be where the old
one was. So the reader remembers what the last batch looked like, and **every question on the replay socket starts
at the last batch that was applied**, whose answer must be that very batch (its timestamp makes it unlike any of
another publisher):

    the answer begins with the same batch      nothing was lost but what follows in the answer
    it begins later                            the loss is older than the publisher's buffer
    it begins with another batch, or is empty  this is a new publisher: forget everything, ask from 0

A question is asked at a gap, at a batch that doesn't fit, and when the connection broke, since the batches may fit by
chance. Meanwhile live batches are held back, and applied after the answer.

When something is lost for good, the index is emptied, `complete` becomes False, and the reader asks for the truth (see
the publisher). Without an answer it goes on from there: the index then holds less than the publisher, never more
than the events say. It is complete again when the publisher clears everything, or starts anew.

`Follower` is the brain, without I/O; `EventReader` has the sockets.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import zmq

from cache.event_publisher import END, TRUTH
from cache.events import Batch, Cleared, TierIndex, decode_batch
from contracts.clock import Clock
from contracts.errors import WireError

_RECENT = 4096
"""Applied batches whose digests are remembered, to know a duplicate from another publisher's."""
_HELD = 4096
"""Live batches held back during a question; what overflows is asked for again."""
_TRIES = 3
"""Questions in a row that did not help, before the loss is accepted."""
_READ = 4096
"""Messages read in one `poll`, so that a fast publisher can't keep the reader there."""


class Follower:
    """Live batches and answers in; the index and the next question out."""

    def __init__(self, can_ask: bool) -> None:
        self.index = TierIndex()
        self.complete = False
        """Whether the index is all that the publisher holds, as of the last batch that arrived."""
        self.question: bytes | None = None
        """Asked, or to be asked now; None: nothing is open."""
        self.lost = self.damaged = self.restarts = 0
        self._can_ask = can_ask
        self._last: tuple[int, bytes | None] | None = None
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._tries = 0
        self._answers = 0

    @property
    def next(self) -> int:
        """The sequence number that would fit."""
        return 0 if self._last is None else self._last[0] + 1

    def live(self, seq: int, payload: bytes) -> None:
        """A batch from the subscription."""
        if self.question is not None:
            self._held[seq] = payload
            if len(self._held) > _HELD:
                self._held.popitem(last=False)
        elif seq == self.next and self._apply(seq, payload):
            self.complete = self.complete or seq == 0
        elif self._recent.get(seq) != _digest(payload):
            self._held[seq] = payload
            self._ask()

    def disconnected(self) -> None:
        """The publisher was away: whether it is the same is to be asked."""
        if self.question is None:
            self._ask()

    def answer(self, seq: int, payload: bytes) -> None:
        """A batch of the answer to `question`."""
        first = self._answers == 0
        self._answers += 1
        if self.question == TRUTH:
            self._adopt_truth(seq, payload, first)
        elif first and self._last is not None and seq == self._last[0]:
            if self._last[1] not in (None, _digest(payload)):
                self._new_publisher()
        elif seq == self.next and (self._last is None or not first):
            if self._apply(seq, payload):
                self._tries = 0
                self.complete = self.complete or seq == 0
            else:
                self._lose(seq)
        elif seq >= self.next:
            self._lose(seq - 1)
            if not self._apply(seq, payload):
                self._lose(seq)

    def answered(self) -> None:
        """The end of the answer."""
        answers, was_truth = self._answers, self.question == TRUTH
        self.question, self._answers = None, 0
        if was_truth:
            self.complete = answers > 0 and not self.damaged_truth
        elif not answers and self._last is not None:
            self._new_publisher()
        elif self._wants_truth:
            self._wants_truth = False
            self._pose(TRUTH)
            return
        self._catch_up()

    def unanswered(self) -> None:
        """The answer did not come in time."""
        was_truth = self.question == TRUTH
        self.question, self._answers = None, 0
        if was_truth:
            self._catch_up()
        else:
            self._ask()

    _wants_truth = False
    damaged_truth = False

    def _catch_up(self) -> None:
        held, self._held = self._held, OrderedDict()
        for seq, payload in sorted(held.items()):
            self.live(seq, payload)

    def _ask(self) -> None:
        self._tries += 1
        if self._can_ask and self._tries <= _TRIES:
            self._pose((self._last[0] if self._last is not None else 0).to_bytes(8, "big"))
            return
        self._tries = 0
        held, self._held = self._held, OrderedDict()
        for seq, payload in sorted(held.items()):
            if seq == 0:
                self._new_publisher()
            elif seq != self.next:
                self._lose(seq - 1)
            if self._apply(seq, payload):
                self.complete = self.complete or seq == 0
            else:
                self._lose(seq)
        self._wants_truth = False

    def _pose(self, question: bytes) -> None:
        self.question, self._answers = question, 0

    def _apply(self, seq: int, payload: bytes) -> bool:
        """Whether the batch could be read; if so it is applied and is now the last."""
        batch = self._read(payload)
        if batch is None:
            return False
        self.index.apply(batch.events)
        self.complete = self.complete or Cleared() in batch.events
        self._last = (seq, _digest(payload))
        self._recent[seq] = _digest(payload)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return True

    def _read(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except WireError:
            self.damaged += 1
            return None

    def _adopt_truth(self, seq: int, payload: bytes, first: bool) -> None:
        if first:
            self.index.clear()
            self._recent.clear()
            self._last, self.damaged_truth = ((seq - 1, None) if seq else None), False
        batch = self._read(payload)
        if batch is None:
            self.damaged_truth = True
        else:
            self.index.apply(batch.events)

    def _new_publisher(self) -> None:
        self.restarts += 1
        self.index.clear()
        self.complete, self._last = False, None
        self._recent.clear()

    def _lose(self, through: int) -> None:
        """All up to `through` is given up."""
        self.lost += 1
        self.index.clear()
        self.complete, self._wants_truth, self._last = False, self._can_ask, (through, None)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
