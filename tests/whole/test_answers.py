"""Whole clusters on many kinds of checkpoint and layout: what clients get is what the oracle says.

Two starts, the first of them in the soak; between them are every checkpoint kind, dtype and plane between processes,
and the smallest and a usual page size. The full product is `make soak`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster_answers import Case, Scene, expect_greedy, expect_seeded, open_scene

CASES = [
    Case("llama", False, "llama3", "bfloat16", 16, 256, "shm", (2, 2)),
    Case("qwen3", True, "yarn", "float32", 1, 100, "zmq", (1, 2)),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(request.param, tmp_path_factory.mktemp("answers"), CASES.index(request.param)) as scene:
        yield scene


@pytest.fixture(autouse=True)
def settled(scene: Scene) -> Iterator[None]:
    yield
    scene.serving.settle()


@pytest.mark.slow
def test_greedy_answers_are_the_oracles_and_the_path_is_the_path(scene: Scene) -> None:
    expect_greedy(scene, CASES.index(scene.case))


@pytest.mark.slow
def test_seeded_draws_are_the_oracles_and_the_same_alone_in_a_batch_and_streamed(scene: Scene) -> None:
    expect_seeded(scene)


def test_no_part_can_import_the_oracle(scene: Scene) -> None:
    workers = scene.serving.status().values()
    for worker in workers:
        values = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        (path,) = [v for v in values if v.startswith(b"PYTHONPATH=")]
        assert b"tests/unimportable" in path
        mapped = Path(f"/proc/{worker['pid']}/maps").read_text()
        assert "transformers" not in mapped
