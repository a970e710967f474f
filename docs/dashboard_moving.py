"""Make the README's moving picture: the dashboard of a real cluster while workers of it are killed, drained and moved.

    python docs/dashboard_moving.py [FILE]

The cluster is `twinpool demo --chaos`, its page is in a headless Chromium, and a picture is taken every second and a
half. The command fails where an answer of the demo wasn't exact.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tests.support.browser import browsing

FILE = Path(__file__).parent / "dashboard" / "moving.webp"
WIDTH, HEIGHT = 1180, 860
CLIP = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
SHOWN = 820
"""Pixels of a picture's width in the file."""
PICTURES, EVERY_S, SHOW_MS = 36, 1.5, 400
QUALITY = 55
MAX_BYTES = 1_500_000
ADDRESS = re.compile(r"look at (\S+)")


def main(arguments: Sequence[str]) -> int:
    file = Path(arguments[0]) if arguments else FILE
    command = [sys.executable, "-m", "twinpool.cli.commands", "demo", "--chaos", "--minutes", "1.6", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo, browsing() as browser:
        assert demo.stdout is not None
        url = next(found[1] for line in demo.stdout if (found := ADDRESS.search(line)))
        tab = browser.tab()
        tab.look(WIDTH, HEIGHT)
        tab.go(url)
        tab.until("document.body?.dataset.frame > 0", 60)
        rest = threading.Thread(target=lambda: print(demo.stdout.read() if demo.stdout is not None else ""))
        rest.start()
        threading.Event().wait(12.0)  # The questions are asked once, undisturbed.
        pictures = []
        for _ in range(PICTURES):
            picture = Image.open(io.BytesIO(tab.image(clip=CLIP))).convert("RGB")
            pictures.append(picture.resize((SHOWN, SHOWN * picture.height // picture.width), Image.Resampling.LANCZOS))
            threading.Event().wait(EVERY_S)
        rest.join()
        if code := demo.wait():
            return code
    first, *others = pictures
    first.save(file, save_all=True, append_images=others, duration=SHOW_MS, loop=0, quality=QUALITY, method=6)
    size = file.stat().st_size
    print(f"{file.name}: {first.width} x {first.height}, {len(pictures)} pictures, {size / 1e3:.0f} kB")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
