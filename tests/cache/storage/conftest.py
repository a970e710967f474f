from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.storage.rigs import FileRig, MemoryRig, RedisRig, Rig, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if Server.binary() is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def file_rig(tmp_path: Path) -> FileRig:
    return FileRig(tmp_path / "l3")


@pytest.fixture
def redis_rig(server: Server) -> Iterator[RedisRig]:
    rig = RedisRig(server)
    yield rig
    rig.client.close()


@pytest.fixture(params=["memory", "file", "redis"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "memory":
        return MemoryRig()
    found: Rig = request.getfixturevalue(f"{request.param}_rig")
    return found


@pytest.fixture(params=["memory", "file"])
def capped(request: pytest.FixtureRequest) -> Rig:
    """The backends that keep a cap themselves."""
    return MemoryRig() if request.param == "memory" else request.getfixturevalue("file_rig")
