"""`CudaLayerMarks` by a stand-in of the stream: it does what was launched when the test says so, or fails."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch

from twinpool.cache.device.cuda_device import CudaLayerMarks, MarkWord
from twinpool.cache.device.device_port import LayerMarks, layer_groups

LAYERS = {"full": 6, "window": 3}


class LateWord(MarkWord):
    """A word whose stream is late."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._queued = deque[int]()

    def add(self, marks: int) -> None:
        self.launched += marks
        self._queued.append(marks)

    def run(self, times: int) -> None:
        """The stream does the next so many additions."""
        for _ in range(times):
            self._count.add_(self._queued.popleft())
            self._word.copy_(self._count)


class Step:
    """The event behind a step."""

    def __init__(self) -> None:
        self.over = False
        self.error: RuntimeError | None = None
        self.asked = threading.Event()

    @property
    def done(self) -> bool:
        self.asked.set()
        if self.error is not None:
            raise self.error
        return self.over

    def wait(self) -> None: ...

    def order(self) -> None: ...


def launched(word: MarkWord, groups: int = 3) -> CudaLayerMarks:
    """The marks of a step that was launched, layer after layer."""
    marks = CudaLayerMarks(layer_groups(LAYERS, groups), word)
    for layer in range(1, LAYERS["full"] + 1):
        marks.passed({"full": layer, "window": layer // 2})
    marks.end(None)
    return marks


def reached(marks: LayerMarks) -> list[bool]:
    return [marks.reached(group) for group in range(len(marks))]


def test_a_mark_is_reached_when_the_stream_is_through_with_its_layers_and_not_when_they_are_launched() -> None:
    word = LateWord()
    marks = launched(word)
    assert reached(marks) == [False, False, False]
    word.run(1)
    assert reached(marks) == [True, False, False]
    word.run(2)
    assert reached(marks) == [True, True, True]


def test_steps_of_one_device_count_on_in_one_word() -> None:
    word = LateWord()
    first, second = launched(word), launched(word, 2)
    word.run(3)
    assert (reached(first), reached(second)) == ([True] * 3, [False] * 2)
    word.run(1)
    assert reached(second) == [True, False]
    assert (word.seen, word.launched) == (4, 5)


def test_marks_that_a_step_never_came_to_are_not_reached_by_the_next_one() -> None:
    word = LateWord()
    failed = CudaLayerMarks(layer_groups(LAYERS, 3), word)
    failed.passed({"full": 2, "window": 1})
    failed.end(RuntimeError("out of memory"))
    launched(word)
    word.run(4)
    assert reached(failed) == [True, False, False]
    failed.wait(0)
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.wait(2)


def test_an_error_of_the_device_ends_the_wait_for_a_mark() -> None:
    """It comes later than the launch, and the word says nothing of it."""
    word, step = LateWord(), Step()
    marks = launched(word)
    marks.follow(step)
    word.run(1)
    step.error = RuntimeError("an illegal memory access")
    marks.wait(0)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        marks.wait(1)
    assert marks[2].done


def test_all_who_wait_go_on_when_their_own_mark_is_reached() -> None:
    word, step, passed = LateWord(), Step(), [threading.Event() for _ in range(3)]
    marks = launched(word)
    marks.follow(step)

    def lane(group: int) -> None:
        marks.wait(group)
        passed[group].set()

    lanes = [threading.Thread(target=lane, args=(group,)) for group in (2, 1, 0)]
    for thread in lanes:
        thread.start()
    for group in range(3):
        assert not passed[group].is_set()
        word.run(1)
        assert passed[group].wait(60)
    for thread in lanes:
        thread.join()


def test_who_looks_for_the_others_tells_them_also_where_it_fails_itself() -> None:
    word, passed_by, failed = LateWord(), Step(), Step()
    first, second = launched(word), launched(word)
    first.follow(passed_by)
    second.follow(failed)
    found = list[BaseException]()

    def lane(marks: LayerMarks) -> None:
        try:
            marks.wait(2)
        except (AssertionError, RuntimeError) as error:
            found.append(error)

    lanes = [threading.Thread(target=lane, args=(marks,), daemon=True) for marks in (first, second)]
    for thread, step in zip(lanes, (passed_by, failed), strict=True):
        thread.start()  # The first one looks, and the other waits to be told.
        assert step.asked.wait(60)
    failed.error = RuntimeError("an illegal memory access")
    passed_by.over = True
    for thread in lanes:
        thread.join(60)
    assert sorted(type(error).__name__ for error in found) == ["AssertionError", "RuntimeError"]


def test_who_waits_before_the_step_is_launched_goes_on_when_it_failed_at_that() -> None:
    marks = CudaLayerMarks(layer_groups(LAYERS, 2), LateWord())
    found = list[BaseException]()

    def lane() -> None:
        try:
            marks.wait(1)
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=lane)
    thread.start()
    marks.end(RuntimeError("no room"))
    thread.join(60)
    assert [str(error) for error in found] == ["no room"]
