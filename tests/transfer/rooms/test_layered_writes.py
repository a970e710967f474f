"""Writes of layers of pages whose step is under way: what is told to whom when, and what becomes of a failed step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, Prompt, ends, placed
from twinpool.cache.device.cpu_device import AsyncCpuDevice
from twinpool.cache.device.device_port import LayerCounts, LayerMarks, layer_groups
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import ErrorKind
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms.room_states import HandoverFailed, LayeredPages, PromptArrived

SPEC = pool_sets()["all"]
MADE: list[LayerMarks] = []
LAYERS = {pool.name: pool.layers for pool in SPEC.pools}


class Step:
    """The completion of a step that never asks anybody to wait."""

    done = True

    def wait(self) -> None: ...

    def order(self) -> None: ...


@contextmanager
def layered_ends(plane: str = "shm") -> Iterator[Ends]:
    device = AsyncCpuDevice()
    try:
        with ends(SPEC, plane, device=device) as both:
            try:
                yield both
            finally:
                while MADE:  # Closing waits for what is behind them.
                    MADE.pop().end(None)
    finally:
        device.close()


def pages_of(prompt: Prompt, generation: int = 0) -> LayeredPages:
    return LayeredPages(dict(prompt.runs), generation)


def marks_of(groups: int = 2) -> LayerMarks:
    MADE.append(LayerMarks(layer_groups(LAYERS, groups)))
    return MADE[-1]


def arrived(both: Ends, prompt: Prompt, leases: Mapping[str, Lease]) -> dict[str, list[bool]]:
    """By pool, which layers of the first page of its deepest buffer lie at the reader as at the writer."""
    found = {}
    for pool, run in prompt.runs.items():
        sides = ((both.source, run.indices[0]), (both.target, leases[pool].indices[0]))
        (ours, theirs) = (
            max(pools.layout.buffers[pool], key=lambda b: b.spec.layers).stack(pools.region, pools.layout.counts[pool])[
                :, index
            ]
            for pools, index in sides
        )
        found[pool] = [bool((a == b).all()) for a, b in zip(ours, theirs, strict=True)]
    return found


def below(layers: LayerCounts) -> dict[str, list[bool]]:
    """What has `arrived` of each pool when these layers have."""
    return {pool: [layer < layers[pool] for layer in range(most)] for pool, most in LAYERS.items()}


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "nixl", "staged"])
def test_a7_layers_arrive_as_their_marks_are_reached_and_are_announced_once_they_are_finished(plane: str) -> None:
    with layered_ends(plane) as both:
        prompt, step, marks = both.prompt(40), Step(), marks_of()
        leases = both.open(prompt)
        both.sender.write_layers({prompt.room: pages_of(prompt)}, step, marks)
        assert arrived(both, prompt, leases) == below(dict.fromkeys(LAYERS, 0))
        marks.passed(marks.groups[0])
        both.until(lambda: arrived(both, prompt, leases) == below(marks.groups[0]), "the first layers")
        marks.end(None)
        both.until(lambda: arrived(both, prompt, leases) == below(LAYERS), "the other layers")
        both.until(lambda: not len(both.sender_rooms[prompt.room].peer.writes), "the end of the writes")  # type: ignore[union-attr]
        assert both.sender.wanted(prompt.room) == {pool: run.numbers for pool, run in prompt.runs.items()}
        both.sender.write(prompt.room, prompt.all(), (step,))
        assert both.sender_rooms[prompt.room].writes == len(marks), "nothing is written twice"
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})


def test_the_rate_of_a_step_is_that_of_its_links_each_counted_once_and_none_while_one_is_unknown() -> None:
    with layered_ends() as both:
        one, other = both.prompt(40), both.prompt(32)
        for prompt in (one, other):
            both.open(prompt)
        assert both.sender.bytes_per_s([one.room, other.room]) == 0.0, "nothing was carried"
        link = both.sender_rooms[one.room].peer.link  # type: ignore[union-attr]
        link.sent.nbytes, link.sent.busy_s = 600, 2.0
        assert both.sender.bytes_per_s([one.room, other.room]) == 300.0
        for prompt in (one, other):
            both.sender.write(prompt.room, prompt.all(), ())
            both.seal(prompt)
            assert isinstance(both.outcome(prompt.room), PromptArrived)


def test_a9_what_a_step_that_came_to_nothing_wrote_is_written_again() -> None:
    with layered_ends() as both:
        prompt, failed, marks = both.prompt(40), Step(), marks_of()
        leases = both.open(prompt)
        genuine = both.source.region.clone()
        both.source.region ^= 0x55
        both.sender.write_layers({prompt.room: pages_of(prompt)}, failed, marks)
        marks.end(None)
        both.until(lambda: arrived(both, prompt, leases) == below(LAYERS), "what is wrong")
        both.source.region.copy_(genuine)
        both.sender.write(prompt.room, prompt.all(), (Step(),), generation=1)
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})


def test_what_was_written_from_other_places_than_those_that_are_finished_is_written_again() -> None:
    with layered_ends() as both:
        prompt, step, marks = both.prompt(40), Step(), marks_of()
        both.open(prompt)
        elsewhere = {pool: PageNumbers(run.first, (9,) * len(run)) for pool, run in prompt.runs.items()}
        both.sender.write_layers({prompt.room: LayeredPages(elsewhere, 0)}, step, marks)
        marks.end(None)
        both.sender.write(prompt.room, prompt.all(), (step,))
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)


@pytest.mark.parametrize("came_to_nothing", ["other places", "another life"])
def test_a5_what_takes_the_place_of_layers_is_written_once_those_have_landed(came_to_nothing: str) -> None:
    """They go to the same places of the reader: the later one of two must be the good one."""
    with layered_ends() as both:
        prompt, step, marks = both.prompt(40), Step(), marks_of()
        leases = both.open(prompt)
        elsewhere = {pool: PageNumbers(run.first, (9,) * len(run)) for pool, run in prompt.runs.items()}
        both.sender.write_layers({prompt.room: LayeredPages(elsewhere, 0)}, step, marks)
        late = list(both.sender_rooms[prompt.room].posted)
        assert late
        both.sender.write(prompt.room, prompt.all(), (step,), generation=came_to_nothing == "another life")
        good = [queued for queued in both.sender_rooms[prompt.room].posted if queued not in late]
        assert good
        assert all(set(late) <= set(queued.over) for queued in good)
        for _ in range(20):
            both.poll()
        assert arrived(both, prompt, leases) == below(dict.fromkeys(LAYERS, 0)), "the layers are still to be written"
        marks.end(None)
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})


def test_what_later_steps_are_writing_is_left_to_them() -> None:
    """A device runs behind its host: the pages of two steps are under way, and the first is committed."""
    with layered_ends() as both:
        prompt, steps, marks = both.prompt(40), (Step(), Step()), (marks_of(), marks_of())
        both.open(prompt)
        first = {"full": prompt.runs["full"].head(1)}
        both.sender.write_layers({prompt.room: LayeredPages(first, 0)}, steps[0], marks[0])
        left = both.sender.unwritten(prompt.room)
        assert left["full"].start == first["full"].numbers.stop
        rest = {pool: PageNumbers(numbers.start, prompt.runs[pool].at(numbers)) for pool, numbers in left.items()}
        both.sender.write_layers({prompt.room: LayeredPages(rest, 0)}, steps[1], marks[1])
        assert not any(both.sender.unwritten(prompt.room).values())
        marks[0].end(None)
        both.sender.write(prompt.room, {"full": prompt.part("full", first["full"].numbers)}, (steps[0],))
        both.until(lambda: both.receiver_rooms[prompt.room].shares.left("full") == left["full"], "the first page")
        both.sender.write(prompt.room, prompt.all(), (Step(),))
        assert both.sender_rooms[prompt.room].writes == len(marks[0]) + len(marks[1])
        marks[1].end(None)
        both.sender.write(prompt.room, prompt.all(), (steps[1],))
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)


def test_a5_the_last_word_about_a_room_waits_for_layers_that_are_still_to_be_written() -> None:
    with layered_ends("local") as both:
        prompt, step, marks = both.prompt(40), Step(), marks_of()
        both.open(prompt)
        both.sender.write_layers({prompt.room: pages_of(prompt)}, step, marks)
        marks.passed(marks.groups[0])
        both.sender.fail(prompt.room, ErrorKind.CANCELLED, "nobody wants it any more")
        both.poll()
        assert not both.outcomes, "its pages may still be written to"
        marks.end(RuntimeError("the step failed"))
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "nobody wants it any more" in outcome.message
        both.quiet()


def test_a_step_that_fails_fails_the_rooms_that_it_was_writing() -> None:
    with layered_ends() as both:
        prompt, marks = both.prompt(40), marks_of()
        both.open(prompt)
        both.sender.write_layers({prompt.room: pages_of(prompt)}, Step(), marks)
        marks.end(RuntimeError("out of resources"))
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "out of resources" in outcome.message
        both.quiet()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a9_what_all_steps_of_an_earlier_life_of_a_request_wrote_is_written_again(steps: int) -> None:
    """It starts over with several steps under way: what each of them wrote has come to nothing."""
    with layered_ends() as both:
        prompt = both.prompt(40)
        leases = both.open(prompt)
        genuine = both.source.region.clone()
        both.source.region ^= 0x55
        run, lives = prompt.runs["full"], list[LayerMarks]()
        for number in range(steps):
            part = PageNumbers(run.first + 2 * number, run.indices[2 * number : 2 * number + 2])
            lives.append(marks_of())
            both.sender.write_layers({prompt.room: LayeredPages({"full": part}, 0)}, Step(), lives[-1])
        assert both.sender.unwritten(prompt.room)["full"].start == run.first + 2 * steps
        for marks in lives:
            marks.end(None)
        both.until(lambda: not len(both.sender_rooms[prompt.room].peer.writes), "what is wrong")  # type: ignore[union-attr]
        both.source.region.copy_(genuine)
        both.sender.write(prompt.room, {}, (Step(),), generation=1)
        assert both.sender.unwritten(prompt.room)["full"] == run.numbers
        both.sender.write(prompt.room, prompt.all(), (Step(),), generation=1)
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "staged"])
def test_pools_of_unequal_depths_have_their_own_layers_written_at_each_mark(plane: str) -> None:
    """Three layers of full attention and two of windows: no pool's range of layers is another's."""
    spec = pool_sets()["full+window"]
    layers = {pool.name: pool.layers for pool in spec.pools}
    assert len(set(layers.values())) == len(layers)
    device = AsyncCpuDevice()
    try:
        with ends(spec, plane, device=device) as both:
            prompt, step, marks = both.prompt(40), Step(), LayerMarks(layer_groups(layers, 2))
            leases = both.open(prompt)
            both.sender.write_layers({prompt.room: pages_of(prompt)}, step, marks)
            for group in marks.groups[:-1]:
                marks.passed(group)
                want = {pool: [layer < group[pool] for layer in range(most)] for pool, most in layers.items()}
                both.until(lambda want=want: arrived(both, prompt, leases) == want, "the layers of a mark")  # type: ignore[misc]
            marks.end(None)
            both.sender.write(prompt.room, prompt.all(), (step,))
            both.seal(prompt)
            assert isinstance(both.outcome(prompt.room), PromptArrived)
            placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})
    finally:
        device.close()
