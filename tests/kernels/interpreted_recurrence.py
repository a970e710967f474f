"""Recurrences in Triton's interpreter, against the torch twin; run as a script by `test_recurrence_kernels.py`."""

from __future__ import annotations

import os
import random
from itertools import pairwise

from tests.support.listed_plans import listed_slots

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.kernels.claims import answer
from twinpool.engine.attention.attention_backend import RecurrenceBackend, ScanState, conv_positions, scan_buffers
from twinpool.engine.attention.attention_plan import SlotPlan, muted_slots
from twinpool.engine.attention.torch_backend.torch_recurrence import TorchRecurrence
from twinpool.engine.attention.triton_backend.triton_recurrence import TritonRecurrence
from twinpool.engine.tensors.row_exact_linear import Numerics
from twinpool.engine.tensors.shard import WHOLE

CPU = torch.device("cpu")
TRITON = TritonRecurrence()
TORCH = TorchRecurrence(Numerics(4))
SLOTS = 5
Run = tuple[int, int, int]
"""Sequence (its slot less one), start, rows."""


class Scan:
    """Sequences of one shape, and a state for them."""

    def __init__(self, *, delta: bool, heads: int, groups: int, key_dim: int, value_dim: int, length: int) -> None:
        source = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> Tensor:
            return torch.randn(SLOTS - 1, length, *shape, generator=source)

        self.rows = [
            torch.nn.functional.normalize(draw(groups, key_dim), dim=-1),
            torch.nn.functional.normalize(draw(groups, key_dim), dim=-1),
            draw(heads, value_dim),
            -draw(heads).abs(),
            draw(heads).sigmoid() if delta else None,
        ]
        specs = scan_buffers(1, heads, groups, key_dim, value_dim, delta=delta, shard=WHOLE)
        self.buffers = [torch.zeros(SLOTS, *spec.shape) for spec in specs]
        a, b, c, d = self.buffers[:4]
        self.state = ScanState(a, b, c, d, self.buffers[4] if delta else None)

    def run(self, recurrence: RecurrenceBackend, runs: list[Run], muted: tuple[int, ...] = ()) -> list[Tensor]:
        rows = [
            torch.cat([x[sequence, start : start + count] for sequence, start, count in runs])
            if x is not None
            else None
            for x in self.rows
        ]
        plan = plan_of(runs, muted)
        out = recurrence.scan(rows[0], rows[1], rows[2], rows[3], rows[4], self.state, plan)  # type: ignore[arg-type]
        return list(torch.split(out, [count for _, _, count in runs]))


def plan_of(runs: list[Run], muted: tuple[int, ...] = ()) -> SlotPlan:
    plan = listed_slots([s for _, s, _ in runs], [n for _, _, n in runs], [[i + 1] for i, _, _ in runs], CPU)
    return muted_slots(plan, torch.tensor([i in muted for i, _, _ in runs])) if muted else plan


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


STEPS: list[list[Run]] = [
    [(0, 0, 21), (2, 0, 16), (1, 0, 1)],
    [(2, 16, 1), (0, 21, 1), (1, 1, 1)],
    [(1, 2, 33), (0, 22, 10)],
    [(0, 32, 5), (2, 17, 2)],
]
"""Odd ends, whole blocks, one token at a time; sequences in any order."""


def scans_like_the_twin(**shape: int | bool) -> None:
    ours, twin = Scan(**shape, length=40), Scan(**shape, length=40)  # type: ignore[arg-type]
    for runs in STEPS:
        close(ours.run(TRITON, runs), twin.run(TORCH, runs))
        close(ours.buffers, twin.buffers)


def claim_the_delta_rule_is_the_twins() -> None:
    scans_like_the_twin(delta=True, heads=4, groups=2, key_dim=24, value_dim=18)


def claim_the_delta_rule_with_several_tiles_of_columns_is_the_twins() -> None:
    scans_like_the_twin(delta=True, heads=1, groups=1, key_dim=16, value_dim=80)


def claim_mambas_scan_is_the_twins() -> None:
    scans_like_the_twin(delta=False, heads=3, groups=1, key_dim=32, value_dim=20)


def claim_chunks_and_neighbours_change_no_bit_of_a_scan() -> None:
    rng = random.Random(1)
    for delta in (True, False):
        shape = {"heads": 2, "groups": 1, "key_dim": 16, "value_dim": 16, "length": 40}
        whole = Scan(delta=delta, **shape)
        (want,) = whole.run(TRITON, [(1, 0, 40)])
        for _ in range(2):
            cut, parts, at = Scan(delta=delta, **shape), [], 0
            while at < 40:
                count = min(40 - at, rng.choice([1, 1, 2, 15, 16, 17]))
                others = [(i, 0, rng.choice([1, 3, 16])) for i in rng.sample([0, 2, 3], rng.randrange(3))]
                place = rng.randrange(len(others) + 1)
                runs = [*others[:place], (1, at, count), *others[place:]]
                parts.append(cut.run(TRITON, runs)[place])
                at += count
            assert torch.equal(torch.cat(parts), want)
            assert all(torch.equal(a[2], b[2]) for a, b in zip(cut.buffers, whole.buffers, strict=True))


def claim_positions_of_a_block_that_are_computed_again_leave_nothing_of_their_first_tokens() -> None:
    """Drafts that weren't drawn: the rows behind are others now, and what was there before isn't even a number."""
    rng = random.Random(2)
    for delta in (True, False):
        shape = {"heads": 2, "groups": 1, "key_dim": 16, "value_dim": 16, "length": 48}
        for recurrence in (TRITON, TORCH):
            whole, again = Scan(delta=delta, **shape), Scan(delta=delta, **shape)
            (want,) = whole.run(recurrence, [(1, 0, 48)])
            parts, at = [], 0
            while at < 48:
                room = 14 - at % 16
                if room > 0 and rng.random() < 0.6:
                    right = [(x, x[1].clone()) for x in again.rows if x is not None]
                    for x, _ in right:
                        x[1, at + 1 :] = 0.7
                    parts += [out[:1] for out in again.run(recurrence, [(1, at, 1 + rng.randint(1, room))])]
                    for x, rows in right:
                        x[1] = rows
                    at += 1
                    for buffer in again.buffers[1:]:
                        buffer[2, :, at % 16 :] = torch.nan
                else:
                    count = min(48 - at, rng.choice([1, 1, 2, 3, 17]))
                    parts += again.run(recurrence, [(1, at, count)])
                    at += count
            assert torch.equal(torch.cat(parts), want), (delta, recurrence)


def claim_a_convolution_reads_nothing_of_positions_that_are_computed_again() -> None:
    source, rng = torch.Generator().manual_seed(7), random.Random(3)
    for taps in (1, 3):
        x, weight = torch.randn(60, 12, generator=source), torch.randn(taps + 1, 12, generator=source)
        for recurrence in (TRITON, TORCH):
            state = torch.zeros(SLOTS, 3, conv_positions(taps), 4)
            want = recurrence.conv(x, [state.clone()], weight, None, plan_of([(0, 0, 60)]))
            parts, at = [], 0
            while at < 60:
                room = 14 - at % 16
                drafted = rng.randint(0, room) if room > 0 else 0
                rows = torch.cat((x[at : at + 1], torch.full((drafted, 12), torch.nan)))
                parts.append(recurrence.conv(rows, [state], weight, None, plan_of([(0, at, 1 + drafted)]))[:1])
                at += 1
            assert torch.equal(torch.cat(parts), want), (taps, recurrence)


def claim_stale_sequences_write_zeros_to_the_null_slot() -> None:
    for delta in (True, False):
        scan = Scan(delta=delta, heads=2, groups=2, key_dim=16, value_dim=16, length=40)
        scan.run(TRITON, [(0, 0, 20), (1, 0, 20)])
        before = [buffer.clone() for buffer in scan.buffers]
        scan.run(TRITON, [(0, 20, 15), (1, 20, 15)], muted=(0,))
        for now, then in zip(scan.buffers, before, strict=True):
            assert torch.equal(now[1], then[1]), "the slot that was given away is as it was"
            assert not torch.equal(now[2], then[2])
            assert not now[0].any()


def claim_the_convolution_is_the_twins_to_the_bit() -> None:
    source = torch.Generator().manual_seed(5)
    for taps, bias in ((3, True), (1, False), (2, True)):
        held = conv_positions(taps)
        shapes = [(2, held, 5), (3, held, 70)]
        states = [torch.randn(SLOTS, *shape, generator=source) for shape in shapes]
        twins = [state.clone() for state in states]
        weight = torch.randn(taps + 1, 220, generator=source)
        bias_c = torch.randn(220, generator=source) if bias else None
        for runs in ([(0, 0, 21), (2, 4, 1), (1, 9, 2)], [(1, 11, 1), (3, 0, 17)], [(0, 21, 15), (2, 5, 40)]):
            x = torch.randn(sum(n for _, _, n in runs), 220, generator=source)
            got = TRITON.conv(x, states, weight, bias_c, plan_of(runs))
            want = TORCH.conv(x, twins, weight, bias_c, plan_of(runs))
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            assert all(torch.equal(a, b) for a, b in zip(states, twins, strict=True)), "inputs are copied, not computed"


def claim_chunks_change_no_bit_of_a_convolution() -> None:
    source = torch.Generator().manual_seed(6)
    x, weight = torch.randn(23, 12, generator=source), torch.randn(4, 12, generator=source)
    whole, cut = torch.zeros(SLOTS, 3, conv_positions(3), 4), torch.zeros(SLOTS, 3, conv_positions(3), 4)
    want = TRITON.conv(x, [whole], weight, None, plan_of([(0, 0, 23)]))
    ends = [0, 1, 2, 19, 20, 23]
    parts = [
        TRITON.conv(x[a:b], [cut], weight, None, plan_of([(0, a, b - a)]))
        for a, b in pairwise(ends)
    ]  # fmt: skip
    assert torch.equal(torch.cat(parts), want)
    assert torch.equal(whole, cut)


def claim_a_stale_sequence_leaves_the_null_slot_of_a_convolution_zero() -> None:
    state = torch.randn(SLOTS, 1, conv_positions(3), 8)
    state[0] = 0
    before = state.clone()
    TRITON.conv(torch.randn(6, 8), [state], torch.randn(4, 8), None, plan_of([(0, 5, 2), (1, 5, 4)], muted=(0,)))
    assert torch.equal(state[:2], before[:2])
    assert not torch.equal(state[2], before[2])


if __name__ == "__main__":
    answer(globals())
