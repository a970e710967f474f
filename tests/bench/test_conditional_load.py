"""The bench of conditional disaggregation: what its table says of figures that are known."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from bench.common.bench_report import percentile
from bench.serving.conditional_load import MODES, Seen, table


def test_a_row_has_the_ratio_of_the_medians_and_what_the_running_answers_paid() -> None:
    always = Seen(first=[90.0, 100.0, 400.0], whole=[100.0, 120.0, 500.0], gaps=[4.0] * 98 + [54.0] * 2)
    conditional = Seen(first=[40.0, 50.0, 60.0], whole=[60.0, 60.0, 60.0], gaps=[5.0] * 100, local=3)
    said = StringIO()
    Console(file=said, width=200).print(table({("busy", MODES[0]): always, ("busy", MODES[1]): conditional}))
    (row,) = [line for line in said.getvalue().splitlines() if "busy" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["busy", "100 / 50", "400 / 60", "2.00", "120 / 60", "2.00", "5.0 / 5.0", "54 / 5", "3"]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(1, 101)], share) == value
