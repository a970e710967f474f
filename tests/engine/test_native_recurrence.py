"""Recurrences and short convolutions by the C++ kernels: what torch's operations give, and the same bits alone, in
company, in any chunks, with drafts behind, and as every processor computes them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.engine.native import BUILDS, kernels_or_skip
from tests.support.listed_plans import listed_slots
from twinpool.engine.attention.attention_backend import (
    BLOCK,
    RecurrenceBackend,
    ScanState,
    conv_positions,
    scan_buffers,
    undoable_positions,
)
from twinpool.engine.attention.attention_plan import SlotPlan, muted_slots
from twinpool.engine.attention.torch_backend.torch_recurrence import NativeRecurrence, TorchRecurrence
from twinpool.engine.tensors.row_exact_linear import FAST
from twinpool.engine.tensors.shard import WHOLE

CPU, SLOTS, LENGTH = torch.device("cpu"), 5, 61
Run = tuple[int, int, int]
"""Sequence (its slot less one), start, rows."""
Shape = tuple[bool, int, int, int, int]
SHAPES: list[Shape] = [(True, 4, 2, 64, 64), (True, 5, 1, 24, 18), (False, 6, 1, 32, 20), (False, 2, 2, 16, 96)]
"""The delta rule or none, heads, groups, dimensions of keys and of values."""


def plan_of(runs: list[Run], muted: tuple[int, ...] = ()) -> SlotPlan:
    plan = listed_slots([s for _, s, _ in runs], [n for _, _, n in runs], [[i + 1] for i, _, _ in runs], CPU)
    return muted_slots(plan, torch.tensor([i in muted for i, _, _ in runs])) if muted else plan


class Recurrence:
    """Layers of one shape with a backend, the rows of some sequences, and their state."""

    def __init__(self, backend: RecurrenceBackend, shape: Shape) -> None:
        delta, heads, groups, keys, values = shape
        self._backend, source = backend, torch.Generator().manual_seed(4)

        def draw(*shape: int) -> Tensor:
            return torch.randn(SLOTS - 1, LENGTH, *shape, generator=source)

        q, k = (torch.nn.functional.normalize(draw(groups, keys), dim=-1) for _ in range(2))
        self.rows = [q, k, draw(heads, values), -draw(heads).abs(), draw(heads).sigmoid()][: 5 if delta else 4]
        specs = scan_buffers(1, heads, groups, keys, values, delta=delta, shard=WHOLE)
        self.buffers = [torch.zeros(SLOTS, *spec.shape) for spec in specs]

    def run(self, runs: list[Run], muted: tuple[int, ...] = ()) -> list[Tensor]:
        rows = [torch.cat([x[i, start : start + count] for i, start, count in runs]) for x in self.rows]
        (q, k, v, decay), (matrix, keys, values, decays) = rows[:4], self.buffers[:4]
        beta, solved = (rows[4], self.buffers[4]) if len(rows) == 5 else (None, None)
        state = ScanState(matrix, keys, values, decays, solved)
        out = self._backend.scan(q, k, v, decay, beta, state, plan_of(runs, muted))
        return list(torch.split(out, [count for _, _, count in runs]))


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> NativeRecurrence:
    return NativeRecurrence(kernels_or_skip(request.param))


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_scan_is_torchs_and_leaves_its_state(native: NativeRecurrence, shape: Shape) -> None:
    ours, twin = Recurrence(native, shape), Recurrence(TorchRecurrence(FAST), shape)
    for runs in (
        [(0, 0, 21), (2, 0, 16), (1, 0, 1)],
        [(2, 16, 1), (0, 21, 1), (1, 1, 1)],
        [(1, 2, 33), (0, 22, 10)],
        [(0, 32, 5), (2, 17, 2)],
    ):
        for got, want in zip([*ours.run(runs), *ours.buffers], [*twin.run(runs), *twin.buffers], strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_position_has_the_same_bits_in_every_chunk_company_and_build_and_with_drafts(
    native: NativeRecurrence, shape: Shape
) -> None:
    """Drafts that weren't drawn leave rows that aren't even numbers; the answer is that of one chunk."""
    rng = random.Random(1)
    whole = Recurrence(NativeRecurrence(kernels_or_skip(BUILDS[0])), shape)
    (want,) = whole.run([(1, 0, LENGTH)])
    cut, parts, at = Recurrence(native, shape), list[Tensor](), 0
    while at < LENGTH:
        drafts = min(rng.choice([0, 0, 1, 6]), undoable_positions(at), LENGTH - 1 - at)
        count = 1 if drafts else min(LENGTH - at, rng.choice([1, 1, 2, 15, 17]))
        others = [(i, 0, rng.choice([1, 3, 20])) for i in rng.sample([0, 2, 3], rng.randrange(3))]
        place, kept = rng.randrange(len(others) + 1), [x[1].clone() for x in cut.rows]
        for x in cut.rows:
            x[1, at + count : at + count + drafts] = 0.7
        runs = [*others[:place], (1, at, count + drafts), *others[place:]]
        parts.append(cut.run(runs)[place][:count])
        for x, rows in zip(cut.rows, kept, strict=True):
            x[1] = rows
        at += count
        for buffer in cut.buffers[1:] if drafts else ():
            buffer[2, :, at % BLOCK :] = torch.nan
    assert torch.equal(torch.cat(parts), want)
    assert torch.equal(cut.buffers[0][2], whole.buffers[0][2])
    for mine, theirs in zip(cut.buffers[1:], whole.buffers[1:], strict=True):
        assert torch.equal(mine[2][:, : LENGTH % BLOCK], theirs[2][:, : LENGTH % BLOCK])


def test_stale_sequences_leave_the_null_slot_and_the_one_that_was_theirs(native: NativeRecurrence) -> None:
    for backend in (native, TorchRecurrence(FAST)):
        scan = Recurrence(backend, SHAPES[0])
        scan.run([(0, 0, 20), (1, 0, 20)])
        before = [buffer.clone() for buffer in scan.buffers]
        scan.run([(0, 20, 15), (1, 20, 15)], muted=(0,))
        for now, then in zip(scan.buffers, before, strict=True):
            assert torch.equal(now[1], then[1])
            assert not torch.equal(now[2], then[2])
            assert not now[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_convolution_is_torchs_to_the_bit_in_any_chunks_and_company(
    native: NativeRecurrence, dtype: torch.dtype
) -> None:
    source, torchs = torch.Generator().manual_seed(5), TorchRecurrence(FAST)
    for taps, bias in ((3, True), (1, False)):
        held = conv_positions(taps)
        x = torch.randn(3, 60, 2 * 5 + 3 * 70, generator=source).to(dtype)
        weight = torch.randn(taps + 1, x.shape[2], generator=source)
        bias_c = torch.randn(x.shape[2], generator=source) if bias else None
        ours, twins = ([torch.zeros(SLOTS, *n, dtype=dtype) for n in ((2, held, 5), (3, held, 70))] for _ in range(2))
        for runs in ([(0, 0, 21), (2, 0, 1), (1, 0, 2)], [(1, 2, 1), (0, 21, 1)], [(0, 22, 15), (2, 1, 40)]):
            rows = torch.cat([x[i, at : at + count] for i, at, count in runs])
            got, want = (
                each.conv(rows, states, weight, bias_c, plan_of(runs))
                for each, states in ((native, ours), (torchs, twins))
            )
            assert torch.equal(got, want)
            activated = native.conv(
                rows, [s.clone() for s in ours], weight, bias_c, plan_of(runs, (0, 1, 2)), activated=True
            )
            assert activated.isfinite().all()
            assert all(torch.equal(a, b) for a, b in zip(ours, twins, strict=True))
        whole, cut = (torch.zeros(SLOTS, 1, held, x.shape[2], dtype=dtype) for _ in range(2))
        want = native.conv(x[0], [whole], weight, bias_c, plan_of([(0, 0, 60)]), activated=True)
        parts = [
            native.conv(x[0, a:b], [cut], weight, bias_c, plan_of([(0, a, b - a)]), activated=True)
            for a, b in pairwise([0, 1, 2, 19, 20, 60])
        ]
        assert torch.equal(torch.cat(parts), want)
        plain = torchs.conv(x[0], [torch.zeros_like(whole)], weight, bias_c, plan_of([(0, 0, 60)]), activated=True)
        torch.testing.assert_close(want, plain, rtol=2**-7, atol=1e-5)
