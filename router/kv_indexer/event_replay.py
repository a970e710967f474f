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
chance. Meanwhile live batches are held back, and applied after the answer. A publisher answers with all that it sent
before: so a batch that came before the question and lies behind the answer's end is from a publisher that is gone, and
is dropped. When the connection breaks while a question is open, its answer may be one of the dead: it is asked again.

When something is lost for good, the index is emptied, `complete` becomes False, and the reader asks for the truth (see
the publisher), whose answer begins with the last batch as well: the next question has to start somewhere. Without an
answer it goes on from there: the index then holds less than the publisher, never more than the events say. It is
complete again when the publisher clears everything, or starts anew.

This is the logic, without I/O; `KVEventSubscriber` (router/kv_indexer/kv_event_subscriber.py) has the sockets.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from contracts.errors import WireError
from contracts.messages.kv_events import TRUTH, AllBlocksCleared, decode_batch
from router.kv_indexer.kv_index import KVIndex

_RECENT = 4096
"""Applied batches whose digests are remembered, to tell a duplicate from another publisher's batch."""
_HELD = 4096
"""Live batches held back during a question; what overflows is asked for again."""
_TRIES = 3
"""Questions in a row that brought nothing new, before the loss is accepted, until the connection breaks."""


class KVEventReplay:
    """Live batches and answers in; the index and the next question out.

    `can_ask`: whether there is a replay socket. `question` is what is to be asked, or has been and isn't answered yet.
    """

    def __init__(self, can_ask: bool) -> None:
        self.index = KVIndex()
        self._whole = False
        self.lost = self.damaged = self.restarts = 0
        self._can_ask = can_ask
        self.question: bytes | None = bytes(8) if can_ask else None
        self._last: tuple[int, bytes | None] | None = None
        """The last batch accounted for, and its digest where it is known."""
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._early: dict[int, bytes] = {}
        """What was held back when the question was sent: its answer goes at least as far, or this is another's."""
        self._doubt = False
        """The connection broke: what fits may be another publisher's."""
        self._broke = False
        """The connection broke since the question was sent: the answer may be a dead publisher's."""
        self._wants_truth = False
        self._untold = 0
        """Questions for the truth in a row that got no answer."""
        self._tries = 1 if can_ask else 0
        self._answers = 0
        self._again = False
        """The rest of this answer is another publisher's: ask it from 0."""
        self._truth: list[tuple[int, bytes]] = []
        """The answer to the question for the truth."""

    @property
    def complete(self) -> bool:
        """Whether the index is all that the publisher held when it sent the last batch that arrived here."""
        return self._whole and not self._doubt and self.question is None

    @property
    def next(self) -> int:
        """The sequence number that would fit."""
        return 0 if self._last is None else self._last[0] + 1

    def live(self, seq: int, payload: bytes) -> None:
        """A batch from the subscription."""
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
        """The connection to the publisher broke; batches that come after this may still be from before."""
        self._doubt = True
        self._held.clear()
        self._broke = self.question is not None
        self._wants_truth, self._untold = self._can_ask and not self._whole, 0
        if self._can_ask and self.question is None:
            self._ask()

    def asked(self) -> None:
        """`question` is sent now: to be told after all that had come until then was given to `live`."""
        self._early, self._broke = dict(self._held), False

    def answer(self, seq: int, payload: bytes) -> None:
        """A batch of the answer to `question`."""
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
        """The end of the answer."""
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
        """The answer did not come in time, or broke off."""
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
        for seq, payload in self._early.items():
            if seq >= self.next and self._held.get(seq) == payload:
                del self._held[seq]

    def _catch_up(self) -> None:
        """Apply what was held back; ask again where it still doesn't fit."""
        for seq in sorted(self._held):
            if seq > self.next:
                return self._ask()
            payload = self._held.pop(seq)
            if seq == self.next:
                self._take(seq, payload)
        self._tries = 0
        self._settle()

    def _ask(self) -> None:
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
        if self._wants_truth and self.question is None:
            self._wants_truth = False
            if not self._whole:
                self._pose(TRUTH)

    def _pose(self, question: bytes) -> None:
        self.question, self._answers, self._again = question, 0, False
        self._early, self._truth = {}, []

    def _take(self, seq: int, payload: bytes) -> None:
        """Apply the batch that is next; what can't be read is lost."""
        try:
            batch = decode_batch(payload)
        except WireError:
            self.damaged += 1
            self._give_up(seq)
            self._last = (seq, _digest(payload))
            return
        self.index.apply(batch.events)
        self._whole = self._whole or seq == 0 or AllBlocksCleared() in batch.events
        self._last = (seq, _digest(payload))
        self._recent[seq] = _digest(payload)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def _adopt(self) -> bool:
        """Take over the whole content, if it is there: first the last batch, unless there was none, then the content
        in pieces that carry the next number."""
        answer, digest = self._truth, None
        if len(answer) > 1 and answer[1][0] == answer[0][0] + 1:
            digest, answer = _digest(answer[0][1]), answer[1:]
        if not answer or any(seq != answer[0][0] for seq, _ in answer) or bool(answer[0][0]) != (digest is not None):
            return False
        truth = KVIndex()
        try:
            for _, payload in answer:
                truth.apply(decode_batch(payload).events)
        except WireError:
            self.damaged += 1
            return False
        self.index, self._whole = truth, True
        self._last = (answer[0][0] - 1, digest) if digest is not None else None
        self._recent.clear()
        return True

    def _new_publisher(self) -> None:
        self.restarts += 1
        self._forget()
        self._last, self._wants_truth = None, False

    def _give_up(self, through: int) -> None:
        """All batches up to `through` are accounted for as lost."""
        self.lost += 1
        self._forget()
        self._last, self._wants_truth, self._untold = (through, None), self._can_ask, 0

    def _forget(self) -> None:
        self.index.clear()
        self._recent.clear()
        self._whole = False


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
