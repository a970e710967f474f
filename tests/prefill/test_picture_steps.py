"""Pictures between steps: a tower computes in slices, nobody waits for another's large picture, and what is kept has a
bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.prefill_parts import PrefillParts
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.contracts.checkpoint.picture_spec import NONE, PictureSpec
from twinpool.contracts.config.worker_config import PrefillConfig
from twinpool.contracts.messages.router_commands import Picture
from twinpool.engine.layers.picture_encoder import AT_ONCE, PictureEncoder, PlacedRows
from twinpool.engine.layers.picture_tower import Slices
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics
from twinpool.prefill.request import PrefillRequest

ROW_BYTES = 4
SPEC = PictureSpec("qwen3_vl", 7, NONE, NONE, 1, 1, 4096, 3, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass
class CountingTower:
    """A tower that takes a slice for each row of a picture, and says of whom each slice was."""

    spec: PictureSpec = SPEC
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    of: list[int] = field(default_factory=list)
    """By slice, the height of the picture."""
    failing: int = 0
    """Which slice fails, once; 0: none."""

    def __call__(self, pixels: torch.Tensor, numerics: Numerics) -> Slices:
        rows = len(pixels)
        for _ in range(rows):
            if self.failing == len(self.of) + 1:
                self.failing = 0
                raise RuntimeError("no memory")
            self.of.append(rows)
            yield
        return torch.zeros(rows, 1)


class SeeingParts(PrefillParts):
    """A scheduler whose prompts have pictures; one slice is computed between two steps."""

    def __init__(self, limit: int = 1 << 20, picture_step_s: float = 1e-9, **prefill: Any) -> None:
        super().__init__(pages=256, picture_step_s=picture_step_s, **prefill)
        self.config = PrefillConfig(picture_step_s=picture_step_s, **prefill)
        self.tower = CountingTower()
        self.encoder = self.pages.encoder = PictureEncoder(self.tower, limit, FAST, None, CpuDevice())
        now = self.clock.now

        def ticking() -> float:
            self.clock.advance(1e-6)
            return now()

        self.clock.now = ticking  # type: ignore[method-assign]

    def ask_seeing(self, name: str, *pictures: tuple[int, int], prompt: int, **options: Any) -> PrefillRequest:
        """A prompt with `pictures`: where each begins, and how many positions it has."""
        request = self.ask(name, prompt, **options)
        request.pictures = [
            PlacedRows(Picture(7, count, 1, count, bytes(3 * count)), f"{name} {at}".encode(), 0, range(at, at + count))
            for at, count in pictures
        ]
        return request

    def step(self) -> dict[str, list[int]]:
        self.scheduler.admit()
        self.pages.compute_pictures(self.requests, self.config, self.clock)
        rows = super().step()
        for request in self.requests:
            request.committed = request.launched
            for picture in request.pictures:
                seen = picture.at[0] < request.launched
                assert not seen or picture.at[-1] < request.launched or self.encoder.has(picture.digest)
        return rows

    def until_done(self, *requests: PrefillRequest) -> list[dict[str, list[int]]]:
        steps: list[dict[str, list[int]]] = []
        while any(request.launched < len(request.tokens) for request in requests):
            steps.append(self.step())
            assert len(steps) < 1000, "it doesn't end"
        return steps


def test_a_prompt_waits_before_its_picture_and_others_go_on() -> None:
    parts = SeeingParts(chunk_tokens=16)
    large = parts.ask_seeing("large", (5, 30), prompt=40)
    words = parts.ask("words", 60)
    first = parts.step()
    assert first["large"] == [*range(5)], "up to the picture, wherever in a page it begins"
    parts.until_done(words)
    assert large.launched == 5
    assert not parts.encoder.has(b"large 5")
    assert len(parts.tower.of) > 1
    parts.until_done(large)
    assert parts.encoder.counters == {"pictures_computed": 1, "pictures_reused": 0}


def test_a_small_picture_takes_turns_with_a_large_one_and_each_is_computed_once() -> None:
    parts = SeeingParts(chunk_tokens=64)
    large, middle = parts.ask_seeing("large", (4, 40), prompt=50), parts.ask_seeing("middle", (4, 10), prompt=20)
    small = parts.ask_seeing("small", (4, 3), prompt=20)
    parts.until_done(small)
    assert parts.tower.of.count(3) == 3
    assert len(parts.tower.of) <= 2 * 3 + 2, "the largest had every other slice"
    assert not parts.encoder.has(b"middle 4")
    parts.until_done(large, middle)
    assert {count: parts.tower.of.count(count) for count in (40, 10, 3)} == {40: 40, 10: 10, 3: 3}


def test_what_is_kept_has_a_bound_and_prompts_that_need_more_take_turns() -> None:
    """Five prompts, each with pictures larger than all that may be kept."""
    limit = 20 * ROW_BYTES
    parts = SeeingParts(limit, picture_step_s=10.0, chunk_tokens=4)
    asked = [parts.ask_seeing(name, (0, 30), (36, 25), (64, 30), prompt=100) for name in "abcde"]
    most = 0
    while any(request.launched < len(request.tokens) for request in asked):
        parts.step()
        most = max(most, sum(rows.nbytes for rows in parts.encoder._kept.values()))
    assert limit < most <= limit + AT_ONCE * 30 * ROW_BYTES
    assert parts.encoder.counters["pictures_computed"] == 15, "none was computed again"


def test_a_picture_that_was_begun_goes_on_while_there_is_no_room_to_begin_another() -> None:
    tower = CountingTower()
    encoder = PictureEncoder(tower, 0, FAST, None, CpuDevice())
    kept, begun, new = (
        PlacedRows(Picture(7, n, 1, n, bytes(3 * n)), bytes([n]), 0, range(n)) for n in (1, 9, 5)
    )  # fmt: skip
    while not encoder.has(kept.digest):
        encoder.compute([kept], ())
    encoder.compute([begun], ())
    assert not encoder.compute([new], [kept.digest])
    encoder.compute([begun], ())
    for _ in range(4):
        assert encoder.compute([begun, new], [kept.digest])
    assert tower.of == [1] + [9] * 6
    assert not encoder.began(new.digest)


def test_a_picture_of_which_a_slice_fails_begins_anew() -> None:
    tower = CountingTower(failing=2)
    encoder = PictureEncoder(tower, 1 << 20, FAST, None, CpuDevice())
    wanted = [PlacedRows(Picture(7, 3, 1, 3, bytes(9)), b"it", 0, range(3))]
    encoder.compute(wanted, ())
    with pytest.raises(RuntimeError, match="no memory"):
        encoder.compute(wanted, ())
    assert not encoder.began(b"it")
    while not encoder.has(b"it"):
        assert encoder.compute(wanted, ())
    assert tower.of == [3] * (1 + 3)


def test_what_nobody_waits_for_is_given_up() -> None:
    parts = SeeingParts(chunk_tokens=16)
    gone = parts.ask_seeing("gone", (4, 30), prompt=40)
    parts.step()
    parts.step()
    parts.leave(gone)
    parts.step()
    assert not parts.encoder._begun
    computed = len(parts.tower.of)
    parts.step()
    assert len(parts.tower.of) == computed


def test_a_prompt_whose_picture_was_begun_is_not_too_late_to_begin() -> None:
    parts = SeeingParts(chunk_tokens=16)
    request, *behind = [parts.ask_seeing(name, (0, 30), prompt=40) for name in "abc"]
    for each in (request, *behind):
        each.begin_by = 1.0
    parts.step()
    assert request.launched == 0
    assert not request.late(2.0)
    assert all(each.late(2.0) for each in behind), "theirs weren't"


def test_a_picture_far_behind_the_next_chunk_is_not_begun() -> None:
    parts = SeeingParts(chunk_tokens=16)
    request = parts.ask_seeing("one", (40, 4), prompt=50)
    parts.step()
    assert not parts.tower.of
    parts.until_done(request)
    assert parts.tower.of == [4] * 4


def test_as_many_slices_are_computed_between_two_steps_as_there_is_time_for() -> None:
    parts = SeeingParts(picture_step_s=10.0, chunk_tokens=16)
    small = [parts.ask_seeing(f"{n}", (4, 5), prompt=10) for n in range(3)]
    parts.step()
    assert len(parts.tower.of) == 15
    assert sum(request.launched == 10 for request in small) == 1, "and the next step has as much as it has room for"
