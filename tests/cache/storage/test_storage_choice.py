"""Which backend the configuration opens."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from tests.cache.storage.rigs import item, name, read_one
from twinpool.cache.storage.backends.backend_factory import make_backend
from twinpool.cache.storage.backends.file_backend import FileBackend
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.backends.redis_backend import RedisBackend
from twinpool.contracts.config.cache_config import StorageConfig
from twinpool.contracts.errors import ConfigError

STRANGER = """
from twinpool.cache.storage import (
    BackendCapacity, BackendCounts, ObjectBuffer, ObjectName, ObjectOutcome, ObjectVerdict, StorageBackend,
)
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.contracts.config import StorageConfig
def make(config: StorageConfig) -> StorageBackend:
    return MemoryBackend(config.path, config.max_bytes)
"""


def config(**keys: object) -> StorageConfig:
    return StorageConfig(**keys)  # type: ignore[arg-type]


def test_the_name_decides(tmp_path: Path) -> None:
    assert make_backend(config()) is None
    chosen = {
        MemoryBackend: config(backend="memory", path=uuid.uuid4().hex),
        FileBackend: config(backend="file", path=str(tmp_path / "l3")),
        RedisBackend: config(backend="redis", url="redis://127.0.0.1:1/0", ttl_s=5),
    }
    for kind, settings in chosen.items():
        backend = make_backend(settings)
        assert backend is not None
        assert type(backend) is kind
        backend.close()


def test_workers_of_one_process_share_a_memory_store_until_the_last_has_closed() -> None:
    settings = config(backend="memory", path=uuid.uuid4().hex, max_bytes=1 << 20)
    one, two = make_backend(settings), make_backend(settings)
    assert one is not None
    assert two is not None
    one.write([item(1)])
    one.close()
    assert read_one(two, name(1))[0].ok
    with pytest.raises(ConfigError, match=r"same cache.storage.max_bytes"):
        make_backend(config(backend="memory", path=settings.path, max_bytes=1 << 21))
    two.close()
    three = make_backend(settings)
    assert three is not None
    assert three.exists([name(1)]) == [False]
    three.close()


def test_a_backend_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger_l3.py").write_text(STRANGER)
    metadata = tmp_path / "stranger_l3-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-l3\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[twinpool.storage]\nattic = stranger_l3:make\ncellar = stranger_l3:nothing\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    backend = make_backend(config(backend="attic", path=uuid.uuid4().hex))
    assert backend is not None
    assert backend.write([item(1)])[0].ok
    backend.close()
    with pytest.raises(ConfigError, match=r"'cellar' can't be loaded.*nothing"):
        make_backend(config(backend="cellar"))
    with pytest.raises(ConfigError, match=r"'loft' is unknown; there are none, memory, file, redis, attic, cellar"):
        make_backend(config(backend="loft"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"backend": "file"}, "set cache.storage.path"),
        ({"backend": "redis"}, "set cache.storage.url"),
        ({"backend": "file", "path": "x", "url": "redis://x"}, "cache.storage.url says nothing to the file backend"),
        ({"backend": "memory", "ttl_s": 3}, "cache.storage.ttl_s says nothing to the memory backend"),
        ({"backend": "redis", "url": "redis://x", "path": "x"}, "cache.storage.path says nothing"),
        ({"backend": "redis", "url": "http://x"}, "not the address of a Redis server"),
    ],
)
def test_settings_that_say_nothing_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(config(**keys))
