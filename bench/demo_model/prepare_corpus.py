"""Build the training text of the demo checkpoint from Debian packages.

    python -m bench.demo_model.prepare_corpus --output CORPUS_DIR

downloads the packages with apt (no installation), unpacks them into a temporary folder and writes
``train.txt`` and ``heldout.txt`` (one paragraph a line), ``SOURCES.md`` and the packages' licence files.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.common.bench_report import flag_parser

_CHARSXP = 9
_STRSXP = 16
_HELD_OUT_SHARE = 0.03
_NOISE = ("[Illustration", "Project Gutenberg")
_ENDINGS = ".!?\"'):;-,"
_REPLACEMENTS = {
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2014": "--",
    "\u2013": "-",
    "\u00e9": "e",
    "\u00e8": "e",
    "\u00ea": "e",
    "\u00e0": "a",
    "\u00e2": "a",
    "\u00f4": "o",
    "\u00e4": "a",
    "\u00e6": "ae",
    "\u00a0": " ",
}


@dataclass(frozen=True)
class Source:
    """One Debian package and the files in it that hold prose."""

    package: str
    files: tuple[str, ...]
    title: str
    terms: str


SOURCES = (
    Source(
        package="r-cran-janeaustenr",
        files=("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
        title="the six completed novels of Jane Austen (1811-1818)",
        terms="the novels are in the public domain (the author died in 1817); the package is under the MIT licence",
    ),
    Source(
        package="golang-github-klauspost-compress-dev",
        files=("usr/share/gocode/src/github.com/klauspost/compress/testdata/Mark.Twain-Tom.Sawyer.txt",),
        title="The Adventures of Tom Sawyer by Mark Twain (1876)",
        terms="the novel is in the public domain (the author died in 1910); the package is under the BSD licence",
    ),
)


@dataclass(frozen=True)
class Fetched:
    """An unpacked package."""

    source: Source
    version: str
    root: Path


def fetch(source: Source, folder: Path) -> Fetched:
    """Download and unpack one package without installing it."""
    subprocess.run(["apt-get", "download", "-q", source.package], cwd=folder, check=True)
    archive = next(folder.glob(f"{source.package}_*.deb"))
    root = folder / source.package
    subprocess.run(["dpkg", "-x", str(archive), str(root)], check=True)
    shown = subprocess.run(["dpkg-deb", "-f", str(archive), "Version"], capture_output=True, text=True, check=True)
    return Fetched(source, shown.stdout.strip(), root)


def lazyload_lines(data: bytes) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database, one list of strings each."""
    position = 0
    while position < len(data):
        inflater = zlib.decompressobj()
        body = inflater.decompress(data[position + 4 :])
        position = len(data) - len(inflater.unused_data)
        yield _character_vector(body)


def _character_vector(body: bytes) -> list[str]:
    """Read an R serialization (XDR, version 3) that holds one character vector."""
    (name_length,) = struct.unpack_from(">i", body, 14)
    position = 18 + name_length
    flags, count = struct.unpack_from(">ii", body, position)
    if flags & 0xFF != _STRSXP:
        raise ValueError("not a character vector")
    position += 8
    lines: list[str] = []
    for _ in range(count):
        flags, size = struct.unpack_from(">ii", body, position)
        if flags & 0xFF != _CHARSXP:
            raise ValueError("a character vector holds something that is not a string")
        position += 8
        lines.append(body[position : position + max(size, 0)].decode("utf-8", "replace"))
        position += max(size, 0)
    return lines


def read_books(path: Path) -> Iterator[list[str]]:
    """The books in one file, each as its lines."""
    if path.suffix == ".rdb":
        yield from lazyload_lines(path.read_bytes())
    else:
        yield path.read_text(encoding="utf-8", errors="replace").splitlines()


def clean(text: str) -> str:
    """Plain ASCII punctuation, single spaces, no emphasis marks."""
    for old, new in _REPLACEMENTS.items():
        text = text.replace(old, new)
    text = text.encode("ascii", "ignore").decode().replace("_", "")
    return re.sub(r"\s+", " ", text).strip()


def paragraphs(lines: list[str]) -> list[str]:
    """Unwrap lines into paragraphs and drop headings and front matter."""
    found: list[str] = []
    pending: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            pending.append(line.strip())
            continue
        text = clean(" ".join(pending))
        pending = []
        if len(text) >= 20 and text[-1] in _ENDINGS and not text.isupper() and not any(mark in text for mark in _NOISE):
            found.append(text)
    return found


def split(book: list[str]) -> tuple[list[str], list[str]]:
    """The book without its end, and its end (held out)."""
    cut = round(len(book) * (1 - _HELD_OUT_SHARE))
    return book[:cut], book[cut:]


def write_sources(fetched: list[Fetched], notes: Path, digests: dict[str, str]) -> None:
    """Record where the text came from and keep each package's licence file."""
    (notes / "licences").mkdir(parents=True, exist_ok=True)
    parts = [
        "# Text behind the demo checkpoint\n",
        "The tokenizer and the model were trained on the following text only, plus synthetic sentences that",
        "`data.py` makes from templates. `prepare.py` fetches the packages and rebuilds the text.\n",
        "| Debian package | Version | Text | Terms | Licence file |",
        "| --- | --- | --- | --- | --- |",
    ]
    for item in fetched:
        name = f"{item.source.package}.txt"
        licence = item.root / "usr/share/doc" / item.source.package / "copyright"
        (notes / "licences" / name).write_bytes(licence.read_bytes())
        row = (f"`{item.source.package}`", item.version, item.source.title, item.source.terms, f"`licences/{name}`")
        parts.append("| " + " | ".join(row) + " |")
    parts.append("\nSHA-256 of what `prepare.py` writes:\n")
    parts += [f"- `{name}`: `{digest}`" for name, digest in digests.items()]
    (notes / "SOURCES.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def prepare(output: Path, notes: Path) -> None:
    """Fetch the packages and write the text, its licences and ``SOURCES.md``."""
    output.mkdir(parents=True, exist_ok=True)
    train: list[str] = []
    heldout: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        fetched = [fetch(source, Path(scratch)) for source in SOURCES]
        for item in fetched:
            for name in item.source.files:
                for book in read_books(item.root / name):
                    kept, held = split(paragraphs(book))
                    train += kept
                    heldout += held
        digests: dict[str, str] = {}
        for name, lines in (("train.txt", train), ("heldout.txt", heldout)):
            text = "\n".join(lines) + "\n"
            (output / name).write_text(text, encoding="utf-8")
            digests[name] = hashlib.sha256(text.encode()).hexdigest()
            print(f"{name}: {len(lines)} paragraphs, {len(text)} characters")
        write_sources(fetched, notes, digests)


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--output", type=Path, required=True, help="folder for train.txt and heldout.txt")
    parser.add_argument("--notes", type=Path, help="folder for SOURCES.md and licences/ (default: --output)")
    arguments = parser.parse_args()
    prepare(arguments.output, arguments.notes or arguments.output)


if __name__ == "__main__":
    main()
