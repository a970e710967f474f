"""A follower against a publisher in this process: any loss, any order of answers, any restart."""

import random
from collections import deque

import pytest

from twinpool.contracts.messages.kv_events import (
    TRUTH,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventMedium,
    KvEvent,
    decode_batch,
    encode_batch,
)
from twinpool.router.kv_indexer.event_replay import KVEventReplay, KVIndex


class Source:
    """What a publisher does, without sockets: a truth, a buffer, answers."""

    def __init__(self, rng: random.Random, buffer: int, knows_truth: bool, name: int) -> None:
        self.rng, self.knows_truth, self.name = rng, knows_truth, name
        self.truth = KVIndex()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.next = 0

    def batch(self) -> tuple[int, bytes]:
        events = [self.event() for _ in range(self.rng.randrange(1, 4))]
        self.truth.apply(events)
        self.buffer.append((self.next, encode_batch(self.name + self.next / 1000, events, 0)))
        self.next += 1
        return self.buffer[-1]

    def event(self) -> KvEvent:
        tier = self.rng.choice(list(EventMedium))
        draw = self.rng.random()
        if draw < 0.01:
            return AllBlocksCleared(tier)
        if draw < 0.35 and self.truth.pages[tier]:
            return BlockRemoved(tier, (self.rng.choice(list(self.truth.pages[tier])),))
        count = self.rng.randrange(1, 4)
        hashes = tuple(self.rng.randbytes(16) for _ in range(count))
        parent = self.rng.choice([None, self.rng.randbytes(16)])
        return BlockStored(tier, parent, hashes, tuple(self.rng.randrange(1000) for _ in range(2 * count)), 2)

    def answer(self, question: bytes) -> list[tuple[int, bytes]]:
        if question != TRUTH:
            return [(seq, payload) for seq, payload in self.buffer if seq >= int.from_bytes(question, "big")]
        if not self.knows_truth:
            return []
        events = [
            BlockStored(tier, entry.parent, (page,), entry.tokens, len(entry.tokens))
            for tier, pages in self.truth.pages.items()
            for page, entry in pages.items()
        ]
        half = len(events) // 2
        parts = [(self.next, encode_batch(0.0, part, 0)) for part in (events[:half], events[half:])]
        return [*list(self.buffer)[-1:], *parts]


def ask(follower: KVEventReplay, source: Source, rounds: int = 20) -> None:
    """Answer until there is no question."""
    for _ in range(rounds):
        if follower.question is None:
            return
        follower.asked()
        for seq, payload in source.answer(follower.question):
            follower.answer(seq, payload)
        follower.answered()
    raise AssertionError("the follower asks for ever")


class Line:
    """The connections between a follower and whatever publisher is at the other end.

    Live batches come in order, or not at all; those of a dead publisher may still come after the break was told, and
    those of its successor never before. An answer is made when the question is sent, and may come much later.
    """

    def __init__(self, rng: random.Random, source: Source, follower: KVEventReplay) -> None:
        self.rng, self.source, self.follower = rng, source, follower
        self.live: deque[tuple[int, bytes]] = deque()
        self.answer: list[tuple[int, bytes]] | None = None

    def publish(self, losing: float) -> None:
        batch = self.source.batch()
        if self.rng.random() >= losing:
            self.live.append(batch)

    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            self.follower.live(*self.live.popleft())

    def restart(self) -> None:
        self.source = Source(self.rng, 1000, self.source.knows_truth, self.source.name + 1)
        self.deliver(self.rng.randrange(4))
        self.follower.disconnected()
        self.deliver(self.rng.randrange(4))
        self.live.clear()

    def send_question(self) -> None:
        if self.answer is None and self.follower.question is not None:
            self.deliver(len(self.live))
            self.follower.asked()
            self.answer = self.source.answer(self.follower.question)

    def take_answer(self) -> None:
        if self.answer is not None:
            for batch in self.answer:
                self.follower.answer(*batch)
            self.answer = None
            self.follower.answered()

    def break_answer_off(self) -> None:
        if self.answer is not None:
            for batch in self.answer[: self.rng.randrange(1 + len(self.answer))]:
                self.follower.answer(*batch)
            self.answer = None
            self.follower.unanswered()

    def settle(self) -> None:
        self.deliver(len(self.live))
        self.follower.disconnected()
        for _ in range(20):
            if self.follower.question is None:
                return
            self.send_question()
            self.take_answer()
        raise AssertionError("the follower asks for ever")


def stand(seed: int, knows_truth: bool) -> None:
    """Random losses, delays, restarts and breaks; in the end the index is the truth, or says that it isn't."""
    rng = random.Random(seed)
    source = Source(rng, rng.choice([2, 8, 1000]), knows_truth, name=1)
    for _ in range(rng.randrange(5)):
        source.batch()  # before the follower joins
    follower = KVEventReplay(can_ask=True)
    line = Line(rng, source, follower)
    losing = rng.choice([0.0, 0.1, 0.6])
    for _ in range(150):
        draw = rng.random()
        if draw < 0.02:
            line.restart()
        elif draw < 0.04:
            follower.disconnected()
        elif draw < 0.06:
            line.break_answer_off()
        elif draw < 0.15:
            line.send_question()
        elif draw < 0.25:
            line.take_answer()
        elif draw < 0.5:
            line.deliver(rng.randrange(1, 6))
        else:
            line.publish(losing)
        assert not follower.complete or follower.question is None
    line.settle()
    if not follower.complete:
        assert not knows_truth
        assert follower.lost
    else:
        assert follower.index == line.source.truth
    for tier, pages in follower.index.pages.items():
        assert pages.items() <= line.source.truth.pages[tier].items(), "the index never holds more than the publisher"


@pytest.mark.parametrize("knows_truth", [True, False])
def test_the_index_equals_the_truth_after_any_losses(knows_truth: bool) -> None:
    for seed in range(30):
        stand(seed, knows_truth)


@pytest.mark.soak
@pytest.mark.parametrize("knows_truth", [True, False])
def test_the_index_equals_the_truth_after_any_losses_in_many_runs(knows_truth: bool) -> None:
    for seed in range(5000):
        stand(seed, knows_truth)


def pages_of(index: KVIndex) -> set[tuple[EventMedium, bytes]]:
    return {(tier, page) for tier, pages in index.pages.items() for page in pages}


def source_and_follower(buffer: int = 100, knows_truth: bool = False) -> tuple[Source, KVEventReplay]:
    source, follower = Source(random.Random(0), buffer, knows_truth, 1), KVEventReplay(can_ask=True)
    ask(follower, source)
    return source, follower


def test_a_gap_is_asked_for_from_the_last_batch_that_was_applied() -> None:
    source, follower = source_and_follower()
    follower.live(*source.batch())
    source.batch()
    follower.live(*source.batch())
    assert follower.question == bytes(8)
    assert not follower.complete
    ask(follower, source)
    assert follower.complete
    assert follower.index == source.truth
    assert follower.lost == 0


def test_a_publisher_that_has_sent_nothing_yet_is_known_wholly() -> None:
    source, follower = source_and_follower()
    assert follower.complete
    follower.live(*source.batch())
    assert follower.complete
    assert follower.index == source.truth


def test_more_than_is_held_back_during_a_question_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.router.kv_indexer.event_replay._HELD", 3)
    source, follower = source_and_follower()
    follower.live(*source.batch())
    source.batch()
    follower.live(*source.batch())
    follower.asked()
    answer = source.answer(follower.question or b"")
    for _ in range(5):
        follower.live(*source.batch())
    for batch in answer:
        follower.answer(*batch)
    follower.answered()
    assert not follower.complete, "of five that came meanwhile two are lost"
    ask(follower, source)
    assert follower.complete
    assert follower.index == source.truth
    assert (follower.lost, follower.restarts) == (0, 0)


def test_a_restart_is_noticed_even_where_the_numbers_fit() -> None:
    source, follower = source_and_follower()
    for _ in range(5):
        follower.live(*source.batch())
    other = Source(random.Random(1), 100, False, 2)
    for _ in range(5):
        other.batch()
    follower.disconnected()
    follower.live(*other.batch())
    follower.asked()
    for batch in other.answer(follower.question or b""):
        follower.answer(*batch)
    follower.answered()
    assert follower.question == bytes(8), "a new publisher is asked from its first batch on"
    ask(follower, other)
    assert follower.restarts == 1
    assert follower.complete
    assert follower.index == other.truth


def test_a_loss_beyond_the_buffer_is_reported_and_the_old_index_is_gone() -> None:
    source, follower = source_and_follower(buffer=2)
    for _ in range(4):
        follower.live(*source.batch())
    before = pages_of(follower.index)
    assert before, "there was something to forget"
    missed = [source.batch() for _ in range(5)]
    last = source.batch()
    follower.live(*last)
    ask(follower, source)
    assert not follower.complete
    assert follower.lost == 1
    assert follower.next == source.next
    # Of what was known before the loss nothing stays, but what the batches behind it say again.
    afterwards = KVIndex()
    for _, payload in (missed[-1], last):
        afterwards.apply(decode_batch(payload).events)
    assert follower.index == afterwards
    assert not before & pages_of(follower.index)


def test_the_truth_mends_a_loss_beyond_the_buffer() -> None:
    source, follower = source_and_follower(buffer=2, knows_truth=True)
    follower.live(*source.batch())
    for _ in range(5):
        source.batch()
    follower.live(*source.batch())
    ask(follower, source)
    assert follower.complete
    assert follower.index == source.truth


def test_without_a_replay_socket_a_gap_is_a_loss() -> None:
    source, follower = Source(random.Random(0), 100, False, 1), KVEventReplay(can_ask=False)
    follower.live(*source.batch())
    assert follower.complete
    source.batch()
    follower.live(*source.batch())
    assert not follower.complete
    assert follower.lost == 1
    assert follower.question is None


def test_a_batch_that_cannot_be_read_is_lost_and_counted() -> None:
    source, follower = source_and_follower()
    follower.live(*source.batch())
    follower.live(source.batch()[0], b"\xc1")
    assert follower.damaged == 1
    assert follower.question == TRUTH
    assert not follower.complete
    assert not any(follower.index.pages.values())


def test_clearing_everything_makes_a_partial_index_whole() -> None:
    follower = KVEventReplay(can_ask=False)
    follower.live(7, encode_batch(1.0, [BlockRemoved(EventMedium.HOST, (bytes(16),))], 0))
    assert not follower.complete
    follower.live(8, encode_batch(1.0, [AllBlocksCleared()], 0))
    assert follower.complete


def test_a_duplicate_of_an_applied_batch_is_ignored() -> None:
    source, follower = source_and_follower()
    first = source.batch()
    follower.live(*first)
    follower.live(*source.batch())
    follower.live(*first)
    assert follower.question is None
    assert follower.index == source.truth


def test_a_new_publisher_is_noticed_although_all_that_is_known_is_the_truth() -> None:
    source, follower = source_and_follower(buffer=2, knows_truth=True)
    for _ in range(5):
        source.batch()
    follower.live(*source.batch())
    ask(follower, source)
    assert follower.lost == 1
    follower.disconnected()
    ask(follower, source)
    assert follower.complete
    assert follower.restarts == 0, "it is the same publisher"
    other = Source(random.Random(1), 100, True, 2)
    for _ in range(8):
        other.batch()
    follower.disconnected()
    ask(follower, other)
    assert follower.restarts == 1
    assert follower.complete
    assert follower.index == other.truth


def test_the_last_words_of_a_dead_publisher_are_not_taken_for_its_successors() -> None:
    source, follower = source_and_follower()
    last_words = [source.batch() for _ in range(4)]
    follower.live(*last_words[0])
    follower.disconnected()
    follower.live(*last_words[3])  # sent before the break, and read after it
    other = Source(random.Random(1), 100, False, 2)
    for _ in range(3):
        other.batch()
    ask(follower, other)
    assert follower.next == 3
    assert follower.complete
    assert follower.index == other.truth


@pytest.mark.parametrize("of", ["batches", "truth"])
def test_the_answer_of_a_publisher_that_died_meanwhile_is_asked_again(of: str) -> None:
    source, follower = source_and_follower(buffer=2, knows_truth=True)
    follower.live(*source.batch())
    for _ in range(5):
        source.batch()
    follower.live(*source.batch())
    if of == "truth":
        follower.asked()
        for batch in source.answer(follower.question or b""):
            follower.answer(*batch)
        follower.answered()
        assert follower.question == TRUTH
    follower.asked()
    late = source.answer(follower.question or b"")
    other = Source(random.Random(1), 100, True, 2)
    for _ in range(9):
        other.batch()
    follower.disconnected()
    follower.live(*other.batch())
    for batch in late:
        follower.answer(*batch)
    follower.answered()
    assert not follower.complete
    ask(follower, other)
    assert follower.complete
    assert follower.index == other.truth


@pytest.mark.parametrize("damage", ["no first", "no middle", "unreadable"])
def test_a_truth_that_came_in_part_is_not_adopted(damage: str) -> None:
    source, follower = source_and_follower(buffer=2, knows_truth=True)
    for _ in range(5):
        source.batch()
    follower.live(*source.batch())
    for _ in range(2):
        if follower.question == TRUTH:
            break
        follower.asked()
        for batch in source.answer(follower.question or b""):
            follower.answer(*batch)
        follower.answered()
    assert follower.question == TRUTH
    first, middle, last = source.answer(TRUTH)
    changed = {"no first": [middle, last], "no middle": [first], "unreadable": [first, middle, (last[0], b"\xc1")]}
    for batch in changed[damage]:
        follower.answer(*batch)
    follower.answered()
    assert not follower.complete


def test_an_unanswered_question_for_the_truth_is_asked_three_times_and_as_often_after_each_break() -> None:
    source, follower = source_and_follower(buffer=2, knows_truth=True)
    for _ in range(5):
        source.batch()
    follower.live(*source.batch())
    for _ in range(3):
        asked = 0
        while (question := follower.question) is not None:
            follower.asked()
            if question == TRUTH:
                asked += 1
                follower.unanswered()
                continue
            for batch in source.answer(question):
                follower.answer(*batch)
            follower.answered()
        assert asked == 3
        assert not follower.complete
        follower.disconnected()
    ask(follower, source)
    assert follower.complete
    assert follower.index == source.truth
