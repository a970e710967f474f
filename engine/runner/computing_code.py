"""The digest of the code that computes: of two builds with the same one, equal inputs give equal bits on one machine.

Results of fixed computations (`engine.runner.numerics_class`) tell machines and libraries apart, but not builds: a
kernel that adds in another order is found only by a computation that runs it, at a shape at which that shows. So the
source itself is compared. A comment counts as a change: the price is that answers end where they began while a cluster
is upgraded, where they could have moved.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[1]
COMPUTES = ("attention", "gpu", "layers", "models", "native", "runner", "tensors", "weight_formats")
"""The folders of the engine on which results depend. Masks of structured output are named by the library that makes
them."""
SUFFIXES = (".py", ".cpp", ".h")
DIGITS = 10


@cache
def code_digest() -> str:
    """The digest of this process's code, read from the files once, at the first call."""
    return digest_of(ENGINE)


def digest_of(engine: Path) -> str:
    """The digest of the code in the folder `engine`, 10 hexadecimal digits. Takes milliseconds."""
    digest = hashlib.sha256()
    for folder in COMPUTES:
        for path in sorted((engine / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(engine)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]
