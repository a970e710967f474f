"""The router's memory: what large bodies took of it is given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.router import main

ROOT = Path(__file__).parents[3]
TAKES_AND_FREES = """
import resource, sys
from pathlib import Path
from twinpool.router.tokenizer_pool.tokenizer_process import LARGE_BYTES, give_back, map_large_buffers

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

if sys.argv[1] == "mapped":
    map_large_buffers()
bytes(bytearray(24 << 20))  # freed: from here on glibc would take buffers of this size from its heap
at_first, kept, bodies = resident(), [], []
for _ in range(16):
    bodies.append(bytearray(LARGE_BYTES * 8))
    kept.append(bytearray(1024))
bodies.clear()
if sys.argv[1] == "given back":
    give_back()
print(resident() - at_first)
"""


def left_behind(how: str) -> int:
    said = subprocess.run(
        [sys.executable, "-c", TAKES_AND_FREES, how], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(said.stdout)


@pytest.mark.parametrize("how", ["mapped", "given back"])
def test_what_large_buffers_took_goes_back_to_the_system(how: str) -> None:
    if left_behind("nothing is done") < 2**22:
        pytest.skip("this C library gives it back by itself")
    assert left_behind(how) < 2**20


def test_the_routers_process_maps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []
    monkeypatch.setattr(main, "map_large_buffers", lambda: done.append("mapped"))
    monkeypatch.setattr(main, "log_to_stream", lambda _: None)
    arguments = ["--model", "m", "--controller", "127.0.0.1:1", "--port", "0", "--config-json", str(tmp_path / "none")]
    assert main.main(arguments) == 1, "there is no such configuration"
    assert done == ["mapped"]
