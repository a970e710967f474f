"""What the scripts of this folder say, each run once a session in a process of its own (`forked_scripts.py`), as many
at a time as there are cores: most of the time of these tests is theirs.

A test names its script by the marker `runs`, and a claim of it by its parameter. From the first test that asks on, all
scripts that the session's tests will ask for are on their way, with those claims alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.forked_scripts import Said, ScriptFailed, run_scripts

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
    at_once = max(1, len(os.sched_getaffinity(0)) - others)
    runs = {name: Future[Said]() for name in wanted}
    over = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        for interpreted in (True, False):
            names = [name for name in wanted if name.startswith("compiled") != interpreted]
            for mine in filter(None, (names[first::at_once] for first in range(at_once))):
                group = {name: runs[name] for name in mine}
                pool.submit(_run, group, wanted, tmp_path_factory.mktemp("triton"), interpreted, over)
        yield lambda name: runs[name].result()
        over.set()
        pool.shutdown(cancel_futures=True)


def _run(
    runs: Mapping[str, Future[Said]],
    claims: Mapping[str, list[str]],
    cache: Path,
    interpreted: bool,
    over: threading.Event,
) -> None:
    """Run these scripts one after the other until it is `over`; what a script doesn't say fails whoever asks for it."""
    try:
        for name, said in run_scripts({name: claims[name] for name in runs}, cache, interpreted=interpreted):
            if isinstance(said, ScriptFailed):
                runs[name].set_exception(said)
            else:
                runs[name].set_result(said)
            if over.is_set():
                return
    finally:
        for name, run in runs.items():
            if not run.done():
                run.set_exception(ScriptFailed(f"{name} was not run: the process that runs the scripts has ended"))


@pytest.fixture
def said(request: pytest.FixtureRequest, scripts: Callable[[str], Said]) -> Said:
    """What the test's own script says."""
    return scripts(request.node.get_closest_marker("runs").args[0])
