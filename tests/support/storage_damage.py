"""Damage on purpose to a storage folder: bits flipped, files cut, files swapped, strangers' files beside them."""

from __future__ import annotations

import random
from pathlib import Path


def damage_folder(folder: Path, seed: int, share: float = 0.3) -> dict[Path, bytes]:
    """Damage about `share` of the objects in `folder`; returns each one's path and what is in it now."""
    rng = random.Random(seed)
    objects = sorted(folder.rglob("*.page"))
    victims = rng.sample(objects, max(6, round(share * len(objects))))
    flipped, cut, swapped = victims[0::3], victims[1::3], victims[2::3]
    for path in flipped:
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    for path in cut:
        content = bytearray(path.read_bytes())
        path.write_bytes(content[: rng.randrange(len(content))])
    if len(swapped) % 2:
        swapped.pop()
    for one, other in zip(swapped[0::2], swapped[1::2], strict=True):
        left, right = one.read_bytes(), other.read_bytes()
        one.write_bytes(right)
        other.write_bytes(left)
    for number, path in enumerate(rng.sample(objects, 4)):
        (path.parent / f"stranger-{number}").write_bytes(rng.randbytes(100))
    (folder / "notes.txt").write_text("not a page")
    return {path: path.read_bytes() for path in [*flipped, *cut, *swapped]}


def still_damaged(damaged: dict[Path, bytes]) -> list[Path]:
    """Those that nobody has met: who meets one takes it away, and may write it again as it should be."""
    return [path for path, content in damaged.items() if path.exists() and path.read_bytes() == content]
