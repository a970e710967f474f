"""What the host does to plan a step: as much as the step needs, and nothing that only a checking device looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.harness import GREEDY, Bench, MakeCheckpoint, row
from tests.support.checkpoints import VOCAB
from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.errors import UnorderedAccess
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.device_rows import TokenHistory


class Listening(CpuDevice):
    """Keeps what operations said of themselves."""

    def __init__(self, *, checks: bool) -> None:
        self.checks = checks
        self.said: list[int] = []

    def submit(self, op: Any, run: Any, after: Sequence[Any] = (), **options: Any) -> Any:
        self.said.append(sum(len(span.pages) for span in (*op.reads, *op.writes)))
        return super().submit(op, run, after, **options)


@pytest.mark.parametrize("checks", [False, True])
def test_a_step_names_its_pages_for_a_device_that_looks_at_them_and_for_no_other(
    checkpoint: MakeCheckpoint, checks: bool
) -> None:
    device = Listening(checks=checks)
    bench = Bench(checkpoint("llama"), tokens=512, device=device)
    tokens = list(range(50, 90))
    bench.engine.forward([row(tokens, 0, bench.lease(40), TokenDraw(GREEDY, tuple(tokens), 40))])
    assert device.said == ([6, 0] if checks else [0, 0]), "three pages written, and as many read; the draw needs none"


@pytest.mark.parametrize("device", [CpuDevice(), AdversarialDevice(0)])
def test_devices_say_whether_they_check(device: Device) -> None:
    assert device.checks is isinstance(device, AdversarialDevice)


def test_a_step_takes_the_tokens_of_several_earlier_steps_where_they_lie(checkpoint: MakeCheckpoint) -> None:
    """In any order, and beside tokens that the host knows."""
    from twinpool.engine.runner.batch import TokenFromStep
    from twinpool.engine.runner.launched_step import input_tokens

    bench = Bench(checkpoint("llama"), tokens=1024)
    prompts = [[n, n + 1, n + 2] for n in (20, 40, 60, 80)]
    steps = [
        bench.engine.launch([row(p, 0, bench.lease(8), TokenDraw(GREEDY, tuple(p), 3)) for p in prompts[i : i + 2]])
        for i in (0, 2)
    ]
    drawn = [[out.drawn.token for out in step.outputs() if out.drawn is not None] for step in steps]
    rows = [
        row(source, 3, [1], None)
        for source in (
            TokenFromStep(steps[1], 1),
            [11, 12],
            TokenFromStep(steps[0], 0),
            TokenFromStep(steps[1], 0),
            [13],
        )
    ]
    tokens_m, beside_n = input_tokens(rows, 2, torch.device("cpu"), [4, 2])
    assert beside_n.tolist() == [4, 2]
    got = tokens_m.tolist()
    assert got == [drawn[1][1], 11, 12, drawn[0][0], drawn[1][0], 13, 0, 0]


class Refusing(CpuDevice):
    """Refuses forward passes while told to, as a device does that finds two operations without an order."""

    def __init__(self) -> None:
        self.refuses = False

    def submit(self, op: Any, run: Any, after: Sequence[Any] = (), **options: Any) -> Any:
        if self.refuses:
            raise UnorderedAccess("planted")
        return super().submit(op, run, after, **options)


def test_a_step_that_was_refused_leaves_tables_and_histories_as_the_device_has_them(checkpoint: MakeCheckpoint) -> None:
    """The same step again brings what the refused one would have brought: else it would read pages and tokens that
    never came. All tokens but a few are in the prompt, and the penalty lets none of them be drawn again."""
    device = Refusing()
    bench = Bench(checkpoint("llama"), tokens=1024, device=device)
    few = {VOCAB - 1, VOCAB - 7, 11}
    prompt = [token for token in range(VOCAB) if token not in few]
    params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1e6)
    table = TableSlice.of(bench.lease(len(prompt) + 2))
    history = TokenHistory(list(prompt))

    def of(tokens: list[int], start: int, draw: TokenDraw | None) -> BatchRow:
        return BatchRow(tokens, start, {"full": table}, draw)

    bench.engine.forward([of(prompt[:-1], 0, None)])
    last = of(prompt[-1:], len(prompt) - 1, TokenDraw(params, history, len(prompt), at=len(prompt)))
    for refuses in (True, True, False):
        device.refuses = refuses
        if refuses:
            with pytest.raises(UnorderedAccess, match="planted"):
                bench.engine.begin([last])
    (out,) = bench.engine.forward([last])
    assert out.drawn is not None
    assert out.drawn.token in few
