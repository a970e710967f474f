"""The factory of storage backends: it opens the one that the configuration names, built in or of another package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from twinpool.cache.storage.storage_backend import StorageBackend
from twinpool.contracts.config.cache_config import StorageConfig
from twinpool.contracts.errors import ConfigError

ENTRY_POINTS = "twinpool.storage"
"""The group of entry points in which other packages offer a `Callable[[StorageConfig], StorageBackend]`."""


def make_backend(config: StorageConfig) -> StorageBackend | None:
    """Open the backend that `cache.storage.backend` names; None for `none`.

    Raises `ConfigError` for an unknown name, for a backend that can't be loaded or opened, and for settings that the
    backend doesn't have.
    """
    if config.backend == "none":
        return None
    built_in = _BUILT_IN.get(config.backend)
    if built_in is not None:
        return built_in(config)
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.backend not in others:
        known = ", ".join(["none", *_BUILT_IN, *sorted(others)])
        raise ConfigError(
            f"cache.storage.backend {config.backend!r} is unknown; there are {known}, and packages can add their own "
            f"by an entry point of the group {ENTRY_POINTS}"
        )
    try:
        factory: Callable[[StorageConfig], StorageBackend] = others[config.backend].load()
    except Exception as error:  # A third-party module may raise anything; the operator must see which one it was.
        raise ConfigError(f"cache.storage.backend {config.backend!r} can't be loaded: {error}") from error
    return factory(config)


def _memory(config: StorageConfig) -> StorageBackend:
    from twinpool.cache.storage.backends.memory_backend import MemoryBackend

    _refuse(config, url=config.url, ttl_s=config.ttl_s)
    return MemoryBackend(config.path, config.max_bytes)


def _file(config: StorageConfig) -> StorageBackend:
    from twinpool.cache.storage.backends.file_backend import FileBackend

    _refuse(config, url=config.url, ttl_s=config.ttl_s)
    if not config.path:
        raise ConfigError("cache.storage.backend file needs a folder: set cache.storage.path")
    path = Path(config.path).expanduser()
    return FileBackend(path, config.max_bytes, config.timeout_s, group=config.group_access)


def _redis(config: StorageConfig) -> StorageBackend:
    try:
        from twinpool.cache.storage.backends.redis_backend import RedisBackend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        raise ConfigError("cache.storage.backend redis needs a package: pip install 'twinpool[redis]'") from None
    _refuse(config, path=config.path)
    if not config.url:
        raise ConfigError("cache.storage.backend redis needs a server: set cache.storage.url, as redis://host:6379/0")
    return RedisBackend(config.url, config.timeout_s, config.ttl_s)


_BUILT_IN: dict[str, Callable[[StorageConfig], StorageBackend]] = {"memory": _memory, "file": _file, "redis": _redis}


def _refuse(config: StorageConfig, **settings: object) -> None:
    for key, value in settings.items():
        if value:
            raise ConfigError(f"cache.storage.{key} says nothing to the {config.backend} backend: leave it out")
