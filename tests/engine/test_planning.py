"""What the host does to plan a step: as much as the step needs, and nothing that only a checking device looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cache.device.adversarial_device import AdversarialDevice
from cache.device.device_backends import CpuDevice
from cache.device.device_port import Device
from engine.runner.batch import TokenDraw
from tests.engine.harness import GREEDY, Bench, MakeCheckpoint, row


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
    from engine.runner.batch import TokenFromStep
    from engine.runner.launched_step import input_tokens

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
