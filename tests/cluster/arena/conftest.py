"""An arena agent of this machine, as a real process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinpool.cluster.arena.local_agent import LocalArenaAgent
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig


@pytest.fixture
def token() -> str:
    return secrets.token_hex(32)


@pytest.fixture
def agent(token: str, tmp_path: Path) -> Iterator[LocalArenaAgent]:
    agent = LocalArenaAgent(token, tmp_path, ClusterConfig(restart_limit=3), SystemClock())
    agent.start()
    yield agent
    agent.close()
    assert (tmp_path / "arena.log").read_text() == ""
