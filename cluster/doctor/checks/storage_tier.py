"""The storage tier: whether pages can be written there, and whether there is room for as many as it may hold."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path

from twinpool.cache.storage.backends.backend_factory import ENTRY_POINTS
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, sized, warning
from twinpool.contracts.config.cache_config import StorageConfig
from twinpool.contracts.config.ledger_place import without_password
from twinpool.contracts.errors import ConfigError

ASK_S = 2.0
MAX_FILES = 20_000
"""Files of a folder that are looked at: the doctor is to be quick."""


def check_storage(case: DoctorCase) -> Iterator[Finding]:
    """The backend that `cache.storage.backend` names."""
    storage = case.config.cache.storage
    match storage.backend:
        case "none":
            yield fine("no storage tier (cache.storage.backend=none)")
        case "memory":
            yield fine("storage lies in the memory of one process")
        case "file":
            yield from _folder(storage)
        case "redis":
            yield from _server(storage)
        case other:
            if other in {point.name for point in entry_points(group=ENTRY_POINTS)}:
                yield fine(f"{other} is of another package, which looks after itself")
            else:
                yield error(f"cache.storage.backend={other} is unknown", "name none, memory, file or redis")


def _folder(storage: StorageConfig) -> Iterator[Finding]:
    folder = Path(storage.path).expanduser()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    problem = probe_folder(there)
    if problem:
        yield error(f"cache.storage.path {folder} can't be written: {problem}", "name a folder that can be")
        return
    room = shutil.disk_usage(there).free
    files = list(islice(folder.glob("*/*"), MAX_FILES)) if folder.is_dir() else []
    held = sum(file.stat().st_size for file in files if file.is_file())
    if len(files) == MAX_FILES:
        yield fine(f"{folder} can be written, and holds many pages already; {sized(room)} free")
    elif room + held < storage.max_bytes:
        yield warning(
            f"{folder} has room for {sized(room + held)}, and cache.storage.max_bytes is {sized(storage.max_bytes)}",
            "lower cache.storage.max_bytes, or make room",
            "when the disk is full pages aren't stored any more, which counts as a failed write of each",
        )
    else:
        yield fine(f"{folder} can be written; {sized(room)} free")


def _server(storage: StorageConfig) -> Iterator[Finding]:
    shown = without_password(storage.url)
    try:
        import redis

        from twinpool.contracts.wire.redis_connection import open_redis
    except ModuleNotFoundError:
        yield error("cache.storage.backend=redis needs a package", "pip install 'twinpool[redis]'")
        return
    try:
        client = open_redis(storage.url, ASK_S, "cache.storage.url")
    except ConfigError as refused:
        yield error(str(refused), "set cache.storage.url, as redis://host:6379/0")
        return
    try:
        memory = client.info("memory")
    except (redis.RedisError, OSError) as problem:
        yield error(f"cache.storage.url {shown} doesn't answer: {' '.join(str(problem).split())}", "start the server")
        return
    finally:
        client.close()
    most, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", ""))
    if most and policy == "noeviction":
        yield warning(
            f"{shown} takes {sized(most)} and evicts nothing (noeviction): when it is full no page is stored any more",
            "config set maxmemory-policy allkeys-lru, or set cache.storage.ttl_s",
        )
    else:
        yield fine(f"{shown} answers; {sized(most) if most else 'no limit'} of memory, {policy or 'no policy'}")


def probe_folder(folder: Path) -> str:
    """Why no file can be made in a folder, in words; empty where one was made, written and removed."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".twinpool-doctor-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""
