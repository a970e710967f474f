"""Weights that are pushed: what is taken of a file that comes in pieces, and when a folder of them goes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from twinpool.contracts.checkpoint.pushed_weights import (
    LOOK_S,
    STRANGER_S,
    IncomingWeights,
    PushedFolders,
    complete,
    remove_all,
)
from twinpool.contracts.checkpoint.safetensors_headers import read_file_headers, read_headers
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(7.0),
}


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory, whose file system has files without names."""
    made = Path(tempfile.mkdtemp(prefix="twinpool-test-", dir="/dev/shm"))
    save_file(TENSORS, made / "checkpoint.safetensors")
    yield made
    shutil.rmtree(made)


def names(root: Path) -> list[str]:
    return sorted(one.name for one in root.glob("pushed-*"))


def taken(root: Path, raw: bytes, *, partial: bool = False, digest: bytes | None = None, piece: int = 7) -> Path:
    """The folder of a file that has come in pieces; whatever is refused leaves nothing."""
    incoming = IncomingWeights(root, read_file_headers(root / "checkpoint.safetensors"), partial=partial)
    try:
        for at in range(0, len(raw), piece):
            incoming.feed(raw[at : at + piece])
        folder, held = incoming.finish(digest)
        os.close(held)
        return folder
    finally:
        incoming.close()


def test_a_file_that_comes_in_pieces_is_what_was_sent_and_one_that_is_wrong_leaves_nothing(root: Path) -> None:
    raw = save(TENSORS)
    folder = taken(root, raw, digest=hashlib.sha256(raw).digest())
    assert (folder / "model.safetensors").read_bytes() == raw
    shutil.rmtree(folder)
    for wrong, words in (
        (save({**TENSORS, "a": TENSORS["a"].T.contiguous()}), r"the tensor a is F32 \[4, 3\]; the checkpoint's is"),
        (save({**TENSORS, "b": TENSORS["b"].float()}), "the tensor b is F32"),
        (save({**TENSORS, "d": torch.ones(2)}), "has the tensor d, which the checkpoint lacks"),
        (save({"a": TENSORS["a"], "c": TENSORS["c"]}), "lacks the tensor b, which the checkpoint has"),
        (raw[:-1], "cut off"),
        (raw[:9], "cut off"),
        (raw + b"\0", "longer than"),
        ((1 << 40).to_bytes(8, "little") + raw[8:], "no safetensors file"),
        (raw[:8] + b"{" * (len(raw) - 8), "malformed"),
    ):
        with pytest.raises(CheckpointError, match=words):
            taken(root, wrong)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        taken(root, raw, digest=bytes(32))
    with pytest.raises(CheckpointError, match="takes no pushed weights"):
        IncomingWeights(root / "none", {})
    assert names(root) == []


def test_a_part_is_completed_by_the_bytes_that_are_served(root: Path) -> None:
    part = {"b": torch.full((5,), 3.0, dtype=torch.bfloat16)}
    folder = taken(root, save(part), partial=True)
    complete(folder, read_file_headers(root / "checkpoint.safetensors"))
    found = read_headers(folder)
    tensors = {name: load_file(one.file)[name] for name, one in found.items()}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], {**TENSORS, **part}[name]) for name in tensors)
    whole = taken(root, save(TENSORS), partial=True)
    complete(whole, read_file_headers(root / "checkpoint.safetensors"))
    assert [one.name for one in whole.iterdir()] == ["model.safetensors"]


class Router:
    """One router's view of a cluster, beside others of the same folder."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock()
        self.folders = PushedFolders(f"{root},/elsewhere", self.clock)
        self.used: list[str] = []
        self.tried, self.settled = 0, True

    def look(self, seconds: float = LOOK_S) -> None:
        self.clock.advance(seconds)
        self.folders.tend(self.used, self.tried, settled=self.settled)
        self.folders.wait()


def test_pushed_weights_go_when_nothing_needs_them_and_not_before(root: Path) -> None:
    mine, other = Router(root), Router(root)
    first = taken(root, save(TENSORS))
    mine.folders.take(first)
    mine.look(STRANGER_S)
    mine.look(STRANGER_S)
    assert names(root) == [first.name], "its order is under way"
    mine.folders.ordered(first, 1)
    mine.look()
    assert names(root) == [first.name], "the order was made, and isn't known here yet"
    for one in (mine, other):
        one.used, one.tried = [str(first)], 1
        one.look()
    second = taken(root, save(TENSORS))
    mine.folders.take(second)
    mine.folders.ordered(second, 2)
    for one in (mine, other):
        one.used, one.tried, one.settled = [str(second)], 2, False
        one.look()
    assert names(root) == sorted([first.name, second.name]), "workers have yet to follow"
    mine.settled = True
    mine.look()
    assert names(root) == sorted([first.name, second.name]), "another router knows no better yet"
    other.settled = True
    other.look()
    assert names(root) == [second.name], "the last one that held it removes it"
    # A change that was refused goes at once, and one that is given up when that is known.
    third, fourth = taken(root, save(TENSORS)), taken(root, save(TENSORS))
    mine.folders.take(third)
    mine.folders.refused(third)
    mine.folders.unsure(third)
    assert names(root) == sorted([second.name, fourth.name])
    mine.folders.take(fourth)
    mine.folders.ordered(fourth, 3)
    mine.tried = 3
    mine.look()
    assert names(root) == [second.name]
    # Routers are replaced; with the cluster's end all of it goes.
    mine.folders.close()
    remove_all(str(root))
    assert names(root) == [second.name], "a router holds it"
    other.folders.close()
    remove_all(f" {root} ,/elsewhere")
    assert names(root) == []
    remove_all("")
    remove_all(str(root / "none"))


def test_what_a_dead_process_has_left_goes_after_a_while_unless_somebody_holds_it(root: Path) -> None:
    mine, stranger = Router(root), Router(root)
    left, held, unsure = (taken(root, save(TENSORS)) for _ in range(3))
    stranger.folders.take(held)
    mine.folders.take(unsure)
    mine.folders.unsure(unsure)
    mine.look()
    mine.settled = False  # Its controller is away, so that what it knows may be old.
    mine.look(STRANGER_S)
    mine.settled = True
    mine.look(STRANGER_S - 1)
    assert len(names(root)) == 3
    mine.look()
    assert names(root) == [held.name]
    with pytest.raises(CheckpointError, match="isn't there any more"):
        mine.folders.take(left)
    assert held in mine.folders
    assert root / "mine" not in mine.folders
    assert held / "below" not in mine.folders
    stranger.folders.close()


def test_a_folder_of_somebody_else_whose_name_begins_alike_stays(root: Path) -> None:
    mine, theirs = Router(root), root / "pushed-final"
    theirs.mkdir()
    assert theirs not in mine.folders
    mine.look()
    mine.look(STRANGER_S)
    remove_all(str(root))
    assert names(root) == ["pushed-final"]


def test_memory_that_is_full_refuses_before_anything_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"no room for .* bytes of weights: No space left on device"):
        taken(root, save(TENSORS))
    assert names(root) == []
