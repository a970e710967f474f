"""How tests are dealt out to the processes that run them side by side (pytest-xdist).

A file stays together, as its tests share what it sets up. Those of tests/whole start clusters and mostly wait: one
process takes all of them, from the start, while the other computes. Those of tests/kernels share what their scripts
say.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

WHOLE, KERNELS = "tests/whole/", "tests/kernels/"


class ByFile(LoadScopeScheduling):
    """See the module's prose."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next((folder for folder in (WHOLE, KERNELS) if nodeid.startswith(folder)), None)
        return shared or nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long by waiting begins first, where there is more than one process."""
    if config.getoption("tx", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith((WHOLE, KERNELS)))
