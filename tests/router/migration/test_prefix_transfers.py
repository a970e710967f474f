"""Finished prefixes that a leaving worker offers: who gets them, and what becomes of an offer that ends half way."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.router_commands import Command, PullPrefix, PushPrefix
from twinpool.contracts.messages.worker_events import PrefixOffered, PullDone, PushReady
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.migration.migrations import OFFER_PATIENCE_S, PrefixTransfers
from twinpool.router.state.worker_table import WorkerKey, WorkerTable

MARK = Fingerprint(3, "layout", "exact", "weights")


class Scene:
    """A decode worker that leaves, and others with `free` pages each; the first of them is of another kind."""

    def __init__(self, *free: int) -> None:
        self.clock = ManualClock(100.0)
        self.workers = WorkerTable(RouterConfig())
        self.sent: list[tuple[str, Command]] = []
        rooms = (f"room-{number}" for number in itertools.count())
        self.transfers = PrefixTransfers(self.clock, self.workers, lambda: next(rooms), self.send)
        self.views = [self.view("decode-0", 1), *(self.view(f"decode-{n}", pages) for n, pages in enumerate(free, 1))]
        self.views.append(self.view("prefill-0", 999, Role.PREFILL))
        self.take()

    @staticmethod
    def view(name: str, pages: int, role: Role = Role.DECODE) -> WorkerView:
        worker, one = WorkerName(name), Incarnation(1)
        record = WorkerRecord(worker, role, one, 7, "n", "e", f"control-{name}", WorkerLimits(100, 100), "", MARK)
        return WorkerView(record, WorkerStatus(worker, role, "ready", 7, "n", one, 0, 0, 100, pages))

    def take(self) -> None:
        self.workers.update(self.views)
        for entry in self.workers:
            entry.linked = True

    def send(self, worker: WorkerKey, command: Command) -> None:
        self.sent.append((worker[0], command))

    @staticmethod
    def key(name: str) -> WorkerKey:
        return WorkerName(name), Incarnation(1)

    def offer(self, name: str, tokens: int = 8, source: str = "decode-0") -> str:
        """Offer a prefix; returns who is to get it, empty where nobody is."""
        before = len(self.sent)
        offered = PrefixOffered(RequestId(name), 0, tuple(range(tokens)), "salt")
        assert self.transfers.on_event(self.key(source), offered)
        if len(self.sent) == before:
            return ""
        to, push = self.sent[-1]
        assert to == source
        assert isinstance(push, PushPrefix)
        assert (push.request_id, push.tokens, push.salt) == (name, offered.tokens, "salt")
        return push.peer.name

    def ready(self, name: str, positions: int) -> bool:
        return self.transfers.on_event(self.key("decode-0"), PushReady(RequestId(name), 0, positions))

    def done(self, name: str, nbytes: int) -> bool:
        return self.transfers.on_event(self.key("decode-1"), PullDone(RequestId(name), 0, nbytes))


def test_an_offer_goes_from_its_source_to_its_target_and_is_over_with_the_targets_word() -> None:
    scene = Scene(50)
    assert scene.offer("a") == "decode-1"
    push = scene.sent[0][1]
    assert isinstance(push, PushPrefix)
    assert scene.ready("a", 5)
    to, pull = scene.sent[-1]
    assert isinstance(pull, PullPrefix)
    assert (to, pull.peer.name, pull.peer.control) == ("decode-1", "decode-0", "control-decode-0")
    assert (pull.room, pull.tokens, pull.salt, pull.spare) == (push.room, tuple(range(5)), "salt", True)
    assert len(scene.transfers) == 1
    assert scene.done("a", 1234)
    assert (len(scene.transfers), scene.transfers.bytes) == (0, 1234)
    assert not scene.done("a", 1234), "it is over"
    assert not scene.ready("a", 5)
    assert scene.transfers.bytes == 1234
    assert len(scene.sent) == 2


def test_prefixes_go_to_whom_the_fewest_tokens_are_under_way_and_then_to_who_has_the_most_room() -> None:
    scene = Scene(50, 60)
    assert scene.offer("a", 8) == "decode-2"
    assert scene.offer("b", 4) == "decode-1"
    assert scene.offer("c", 4) == "decode-1"
    assert scene.offer("d", 4) == "decode-2", "eight each: more room"
    assert scene.offer("e", 4) == "decode-1"
    scene.ready("a", 0)
    assert scene.offer("f", 4) == "decode-2", "what is worth no copy is no longer under way"
    assert scene.done("b", 10)
    assert scene.done("c", 10)
    assert scene.done("e", 0)
    assert scene.offer("g", 4) == "decode-1"


def test_an_offer_that_is_told_twice_is_one_and_one_that_fits_nowhere_is_none() -> None:
    scene = Scene(50)
    assert scene.offer("a") == "decode-1"
    assert scene.offer("a") == ""
    assert scene.offer("long", 101) == ""
    assert len(scene.transfers) == 1
    alone = Scene()
    assert alone.offer("a") == "", "its own source is no target, and prefill is none"
    assert len(alone.transfers) == 0


def test_only_workers_of_the_sources_kind_are_given_its_state() -> None:
    scene = Scene(50, 40)
    other = scene.views[1]
    scene.views[1] = replace(other, record=replace(other.record, fingerprint=replace(MARK, layout="another")))
    scene.take()
    assert scene.offer("a") == "decode-2"


@pytest.mark.parametrize("pulled", [False, True])
def test_an_offer_of_which_nothing_is_heard_is_forgotten_and_holds_nothing_back(pulled: bool) -> None:
    scene = Scene(50, 50)
    first = scene.offer("a", 80)
    if pulled:
        scene.ready("a", 80)
    scene.clock.advance(OFFER_PATIENCE_S / 2)
    scene.transfers.tick()
    assert scene.offer("b", 40) != first
    scene.clock.advance(OFFER_PATIENCE_S / 2)
    scene.transfers.tick()
    assert len(scene.transfers) == 1, "the later one has its own time"
    assert scene.offer("c", 10) == first, "nothing is under way there any more"
    assert not scene.done("a", 99), "a late word is nobody's"
    assert scene.transfers.bytes == 0


def test_a_source_that_is_gone_when_its_pages_are_ready_has_nothing_to_pull_from() -> None:
    scene = Scene(50)
    assert scene.offer("a") == "decode-1"
    del scene.views[0]
    scene.take()
    before = len(scene.sent)
    assert scene.ready("a", 8)
    assert len(scene.sent) == before
    scene.clock.advance(OFFER_PATIENCE_S)
    scene.transfers.tick()
    assert len(scene.transfers) == 0
