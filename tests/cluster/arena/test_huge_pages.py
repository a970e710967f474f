"""Files in memory that are mapped where they can have huge pages, and get them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.served_cluster import ROOT
from twinpool.cluster.arena.shared_weights import HUGE_PAGE, collapse, map_shared

WHOLE = 4 * HUGE_PAGE
NBYTES = WHOLE + 12_345


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING)
    os.write(fd, contents())
    yield fd
    os.close(fd)


def contents() -> bytes:
    return np.random.default_rng(7).bytes(NBYTES)


def huge_bytes(pid: int | str, name: str = "huge") -> int:
    """Of files of this name, what a process has mapped by huge pages: by the kernel's word."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inside = f"memfd:{name}" in line
        elif inside and first == "ShmemPmdMapped:":
            found += int(line.split()[1]) * 1024
    return found


def test_a_file_is_mapped_whole_at_a_multiple_of_a_huge_page_and_stays_as_it_is(file: int) -> None:
    memory = map_shared(file, NBYTES)
    assert np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE == 0
    assert memory.readonly
    assert bytes(memory) == contents()
    collapse(memory)
    assert bytes(memory) == contents()


def test_what_it_says_of_huge_pages_is_what_the_system_has_mapped(file: int) -> None:
    memory = map_shared(file, NBYTES)
    assert huge_bytes("self") == 0
    assert collapse(memory) == (huge_bytes("self") == WHOLE)


def test_who_has_mapped_it_before_has_huge_pages_after(file: int) -> None:
    script = (
        "import sys\n"
        "from twinpool.cluster.arena.shared_weights import map_shared\n"
        f"memory = map_shared(int(sys.argv[1]), {NBYTES})\n"
        "print('mapped', flush=True)\n"
        "while sys.stdin.readline():\n"
        "    print(sum(memory), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(file)], pass_fds=(file,), env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "mapped\n"
        collapsed = collapse(map_shared(file, NBYTES))
        print(file=other.stdin, flush=True)
        assert int(other.stdout.readline()) == sum(contents())
        assert huge_bytes(other.pid) == (WHOLE if collapsed else 0)
        other.stdin.close()


def test_a_small_file_has_no_huge_pages(file: int) -> None:
    os.ftruncate(file, HUGE_PAGE - 1)
    memory = map_shared(file, HUGE_PAGE - 1)
    assert not collapse(memory)
    assert bytes(memory) == contents()[: HUGE_PAGE - 1]


def test_what_is_mapped_goes_with_its_view(file: int) -> None:
    memory = map_shared(file, NBYTES)
    assert "memfd:huge" in Path("/proc/self/maps").read_text()
    del memory
    assert "memfd:huge" not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_is_an_error() -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        map_shared(reading, NBYTES)
    os.close(reading)
    os.close(writing)
