"""What the scripts of this folder say, each run once a session in a process of its own, as many at a time as there are
cores: most of the time of these tests is theirs.

A test names its script by the marker `runs`, and a claim of it by its parameter. From the first test that asks on, all
scripts that the session's tests will ask for are on their way, with those claims alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.claims import Said, run_script

PATIENCE_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first to ask waits for a whole script, beside others, perhaps on a busy machine."""
    for item in items:
        if item.get_closest_marker("runs"):
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


@pytest.fixture(scope="session")
def scripts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Said]]:
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        if (mark := item.get_closest_marker("runs")) is not None:
            claims = wanted.setdefault(mark.args[0], [])
            if (parameters := getattr(item, "callspec", None)) is not None and "claim" in parameters.params:
                claims.append(parameters.params["claim"])
    others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) - 1
    pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - others))
    runs = {
        name: pool.submit(run_script, Path(__file__).with_name(name), tmp_path_factory.mktemp("triton"), claims)
        for name, claims in wanted.items()
    }
    yield lambda name: runs[name].result()
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def said(request: pytest.FixtureRequest, scripts: Callable[[str], Said]) -> Said:
    """What the test's own script says."""
    return scripts(request.node.get_closest_marker("runs").args[0])
