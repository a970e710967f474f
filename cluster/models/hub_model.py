"""A model of the Hugging Face Hub, by its name: only the files that serving needs, kept in the Hub's own cache.

`huggingface_hub` resumes what was interrupted, shows its progress, and finds what is in its cache without a network.
It goes by its environment variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from twinpool.contracts.checkpoint.safetensors_headers import INDEX, SINGLE, read_json
from twinpool.contracts.errors import CheckpointError

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


def fetch_from_hub(name: HubName, say: Callable[[str], None]) -> HubModel:
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
    _check(name, folder)
    weights = sorted(_weight_files(folder))
    folder = _fetched(HubName(name.repository, folder.name), weights)
    lacking = [file for file in weights if not (folder / file).is_file()]
    if lacking:
        raise CheckpointError(
            f"{name} has no {lacking[0]}: only weights in safetensors files are read, or one GGUF file "
            f"({name.repository}/FILE.gguf)"
        )
    return HubModel(folder, HubName(name.repository, folder.name))


def _check(name: HubName, folder: Path) -> None:
    """Refuse a model that can't be served before its weights are fetched."""
    from twinpool.engine.models.registry import ARCHITECTURES

    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name} has no config.json: it is no model in the form of transformers; of one with GGUF files, name one "
            f"({name.repository}/FILE.gguf)"
        )
    found = read_json(folder / "config.json").get("architectures")
    architecture = found[0] if isinstance(found, list) and found else "not given"
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{name}: architecture {architecture} is not supported, so its weights aren't fetched; supported are "
            f"{', '.join(ARCHITECTURES)}"
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
