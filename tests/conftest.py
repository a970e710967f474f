"""How tests are dealt out to the processes that run them side by side (pytest-xdist).

A file stays together, as its tests share what it sets up. Those of tests/whole start clusters and mostly wait: two
processes take one half of the files each, from the start, while the third computes. Those of tests/kernels share what
their scripts say. On two cores there are three processes, since tests wait for a third of their time.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import httpx
import hypothesis
import pytest
from httpx._transports import default as httpx_transports
from xdist.scheduler import LoadScopeScheduling

from tests.support.thorough_marks import LISTS, mark_by_lists, mark_later_parameters, stale_patterns
from twinpool.contracts.python_command import COLLECT_AFTER

# An example may take as long as a busy machine makes it: what is too slow is `timeout`'s to say.
hypothesis.settings.register_profile("any machine", deadline=None)
if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.load_profile("any machine")

WHOLE, KERNELS = "tests/whole/", "tests/kernels/"
HALVES = {f"{WHOLE}{path.name}": n % 2 for n, path in enumerate(sorted(Path(__file__).parent.glob("whole/test_*.py")))}
"""The half that a file of tests/whole belongs to: by turns, in the order of their names."""


def pytest_configure() -> None:
    """Have this process say who ends it at once: a timer that a test left behind, say. xdist tells only that it's gone.
    Children that are forked from it end as they do."""
    pid, leave, shown = os.getpid(), os._exit, os.dup(2)  # Nothing is captured yet.

    def told(status: int) -> NoReturn:
        if os.getpid() == pid:
            faulthandler.dump_traceback(file=shown, all_threads=True)
        leave(status)

    os._exit = told
    share_trust()
    gc.set_threshold(*COLLECT_AFTER)


def share_trust() -> None:
    """Have clients of httpx that are given no context of their own share one: to read the certificates of all
    authorities takes a client 50 ms, and tests make thousands of clients."""
    make = httpx.create_ssl_context
    shared = functools.cache(make)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None and not os.environ.keys() & {"SSL_CERT_FILE", "SSL_CERT_DIR"}:
            return shared()
        return make(verify=verify, cert=cert, trust_env=trust_env)

    httpx_transports.create_ssl_context = context  # type: ignore[attr-defined]


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """See the module's prose."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if file.startswith(WHOLE):
            return f"{WHOLE}{HALVES.get(file, 0)}"
        return KERNELS if file.startswith(KERNELS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def the_log_is_as_it_was() -> Iterator[None]:
    """A test that leaves logging quieter than it was would have tests after it see nothing of what they look for."""
    before = logging.getLogger("twinpool").level, logging.root.manager.disable
    yield
    assert (logging.getLogger("twinpool").level, logging.root.manager.disable) == before


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and listed stays until the end: the collector of garbage looks at it neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/soak unread where `-m` leaves it out: all its tests are soaks, and some take seconds to be listed."""
    left_out = collection_path == SOAK and "not soak" in config.getoption("markexpr")
    return True if left_out else None  # None: others may leave it out.


def pytest_itemcollected(item: pytest.Item) -> None:
    """Before marks choose what runs."""
    mark_by_lists(item)


SOAK = Path(__file__).with_name("soak")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """What takes long by waiting begins first, where there is more than one process.

    Where everything is collected, a pattern of a list that names nothing is an error; so is a test of tests/soak that
    is no soak, as nobody would run it.
    """
    if stray := [i.nodeid for i in items if i.path.is_relative_to(SOAK) and i.get_closest_marker("soak") is None]:
        raise pytest.UsageError(f"tests/soak has soaks only: mark {', '.join(stray)}")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for mark in LISTS:
            if stale := stale_patterns(mark):
                raise pytest.UsageError(
                    f"tests/{mark}.txt names no test by: {', '.join(stale)}; take it out, or mend it"
                )
    mark_later_parameters(items)
    yield
    if config.getoption("tx", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(WHOLE))
