"""The full product through whole clusters: every checkpoint kind, rope, dtype, page size, chunk size and data plane.

576 starts, some three hours on two cores. A slice:
``make soak ARGS="tests/soak/test_whole_product.py -k 'yarn and shm'"``.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.cluster_answers import Case, expect_greedy, expect_seeded, open_scene

CASES = [
    Case(*values)
    for values in itertools.product(
        ("llama", "qwen3"),
        (False, True),
        ("default", "linear", "llama3", "yarn"),
        ("float32", "bfloat16"),
        (1, 16, 64),
        (512, 200),
        ("local", "shm", "zmq"),
    )
]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_answers_as_the_oracle_does(case: Case, tmp_path: Path) -> None:
    number = CASES.index(case)
    with open_scene(case, tmp_path, number) as scene:
        expect_greedy(scene, number, count=64)
        expect_seeded(scene)
        scene.serving.settle()
