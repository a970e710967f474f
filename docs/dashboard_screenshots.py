"""Make the pictures of docs/dashboard.md: the real page in a headless Chromium, served by a real router.

    python docs/dashboard_screenshots.py [FOLDER]

The clusters are made up (`bench.serving.dashboard_frames`), since no machine of ours has so many workers.
"""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from bench.common.browser import Browser, Tab, browsing

FOLDER = Path(__file__).parent / "dashboard"
MOST_BYTES = 150_000
COLOURS = 64
LIVE_S = 8.0
"""Seconds for which a page is watched before its picture, so that its latest numbers are of frames."""
SIZES = {"one": (0, 1, 1), "eight": (4, 4, 2), "sixty-four": (24, 40, 4)}
"""Prefill workers, decode workers, routers."""
CLIP = """(() => {{ const boxes = {names}.map((one) => document.querySelector(one).getBoundingClientRect());
    const top = Math.min(...boxes.map((box) => box.top)) + scrollY;
    return [top, Math.max(...boxes.map((box) => box.bottom)) + scrollY - top]; }})()"""


@contextmanager
def made_up(prefill: int, decode: int, routers: int) -> Iterator[str]:
    """Serve a made-up cluster; yields the page's URL."""
    command = [sys.executable, "-m", "bench.serving.dashboard_frames", "--prefill", str(prefill)]
    command += ["--decode", str(decode), "--routers", str(routers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


def save(tab: Tab, path: Path, names: Sequence[str], width: int) -> None:
    """Save the part of the page from the top of the first of these elements to the bottom of the last."""
    top, height = tab.run(CLIP.format(names=list(names)))
    clip = {"x": 0, "y": max(0, top - 12), "width": width, "height": height + 24, "scale": 1}
    picture = Image.open(io.BytesIO(tab.image(clip=clip))).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {picture.width} x {picture.height}, {size / 1e3:.0f} kB")
    assert size <= MOST_BYTES, f"{path.name} has {size} bytes"


def open_page(browser: Browser, url: str, width: int, **look: Any) -> Tab:
    tab = browser.tab()
    tab.look(width, 900, **look)
    tab.go(url)
    tab.until("document.body?.dataset.frame > 0", 60)
    threading.Event().wait(LIVE_S)
    assert tab.complaints == [], tab.complaints
    return tab


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(exist_ok=True)
    with browsing() as browser:
        with made_up(*SIZES["eight"]) as url:
            tab = open_page(browser, url, 1440)
            save(tab, folder / "overview.png", (".bar", "section.workers"), 1440)
            save(tab, folder / "below.png", (".pair",), 1440)
            tab.run("document.getElementById('to-first').click()")
            save(tab, folder / "requests.png", ("section.requests",), 1440)
            phone = open_page(browser, url, 390, dark=True)
            save(phone, folder / "phone.png", (".bar", "section.traffic"), 390)
        with made_up(*SIZES["sixty-four"]) as url:
            save(open_page(browser, url, 1600, dark=True), folder / "sixty-four.png", (".bar", "section.workers"), 1600)
        with made_up(*SIZES["one"]) as url:
            save(open_page(browser, url, 1280), folder / "one.png", (".bar", "section.workers"), 1280)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
