"""The folder in which fetched models are kept, and files that come into it whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinpool.contracts.errors import ConfigError

VARIABLE = "TWINPOOL_MODELS"
"""The environment variable that names the folder."""
_FETCH = ".fetch-"


def models_folder() -> Path:
    """The folder of fetched models: `TWINPOOL_MODELS`, else one below the user's cache folder (XDG). Raises
    `ConfigError` where there is neither."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # stays so where nobody is at home
    if not home.startswith("/"):
        raise ConfigError(f"there is no home folder to keep models in: set {VARIABLE} to a folder")
    return Path(home) / "twinpool" / "models"


@contextmanager
def fetch_folder(folder: Path, max_s: float) -> Iterator[Path]:
    """A new folder in `folder` for one fetch, removed afterwards. What fetches left behind that were killed is removed,
    too: folders that are older than `max_s`, which is the longest that a fetch takes."""
    for one in (*reversed(folder.parents), folder):
        one.mkdir(mode=0o700, exist_ok=True)
    oldest = time.time() - max_s
    for left in folder.glob(f"{_FETCH}*"):
        try:
            dead = left.stat().st_mtime < oldest
        except FileNotFoundError:
            continue
        if dead:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_FETCH, dir=folder, ignore_cleanup_errors=True) as fresh:
        yield Path(fresh)


def keep(file: Path, to: Path) -> None:
    """Move a file that is complete to its place, at once and for good: a reader finds all of it or nothing, and of two
    that do so at once the later wins."""
    with file.open("rb") as written:
        os.fsync(written.fileno())
    to.parent.mkdir(parents=True, exist_ok=True)
    file.replace(to)
