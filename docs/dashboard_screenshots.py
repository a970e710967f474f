"""Make the pictures of docs/dashboard.md: the real page in a headless Chromium, served by a real router.

    python docs/dashboard_screenshots.py [FOLDER]

Where a picture has more workers than a machine of ours, they are simulated (`docs.simulated_dashboard`); else
it is of a real cluster that serves the demo, under a trace's load. Workers that are simulated compute in virtual time;
what decides, tells and shows is what runs in a real one.
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

from bench.common.child_server import serving
from tests.support.browser import Browser, Tab, browsing

FOLDER = Path(__file__).parent / "dashboard"
MAX_BYTES = 150_000
COLOURS = 64
LIVE_S = 8.0
"""Seconds for which a page is watched before its picture, so that its latest numbers are of frames."""
EIGHT, SIXTY_FOUR = (4, 4, 2), (24, 40, 4)
"""Prefill workers, decode workers, routers."""
LOAD_S = 70
"""Seconds for which a real cluster is under load before its picture."""
TRACE = Path(__file__).parents[1] / "bench" / "traces" / "conversation_200.jsonl"
REPLAY = ("--speed", "0.75", "--scale-lengths", "0.1", "--max-context", "1800", "--slo", "ttft=2,itl=0.1")
CLIP = """(() => {{ const boxes = {names}.map((one) => document.querySelector(one).getBoundingClientRect());
    const top = Math.min(...boxes.map((box) => box.top)) + scrollY;
    return [top, Math.max(...boxes.map((box) => box.bottom)) + scrollY - top]; }})()"""


@contextmanager
def simulated(prefill: int, decode: int, routers: int) -> Iterator[str]:
    """Serve a simulated cluster; yields the page's URL."""
    command = [sys.executable, "-m", "docs.simulated_dashboard", "--prefill", str(prefill)]
    command += ["--decode", str(decode), "--routers", str(routers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def real(*flags: str) -> Iterator[str]:
    """Serve the demo, and ask it for `LOAD_S` and on; yields the page's URL."""
    with serving("demo", flags=flags) as url:
        command = [sys.executable, "-m", "twinpool.cli.commands", "replay", str(TRACE), "--url", url, *REPLAY]
        asking = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            threading.Event().wait(LOAD_S)
            assert asking.poll() is None, "the load has ended already"
            yield f"{url}/dashboard"
        finally:
            asking.terminate()
            asking.wait(10)


def save(tab: Tab, path: Path, names: Sequence[str], width: int) -> None:
    """Save the part of the page from the top of the first of these elements to the bottom of the last."""
    top, height = tab.run(CLIP.format(names=list(names)))
    clip = {"x": 0, "y": max(0, top - 12), "width": width, "height": height + 24, "scale": 1}
    picture = Image.open(io.BytesIO(tab.image(clip=clip))).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {picture.width} x {picture.height}, {size / 1e3:.0f} kB")
    assert size <= MAX_BYTES, f"{path.name} has {size} bytes"


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
        with simulated(*EIGHT) as url:
            tab = open_page(browser, url, 1440)
            save(tab, folder / "overview.png", (".bar", "section.workers"), 1440)
            save(tab, folder / "below.png", (".pair",), 1440)
            tab.run("document.getElementById('to-first').click()")
            save(tab, folder / "requests.png", ("section.requests",), 1440)
            phone = open_page(browser, url, 390, dark=True)
            save(phone, folder / "phone.png", (".bar", "section.traffic"), 390)
        with simulated(*SIXTY_FOUR) as url:
            save(open_page(browser, url, 1600, dark=True), folder / "sixty-four.png", (".bar", "section.workers"), 1600)
        with real("--colocate") as url:
            save(open_page(browser, url, 1280), folder / "one.png", (".bar", "section.workers"), 1280)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
