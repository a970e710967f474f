"""A process that asks for an image, says what it was given, and ends with its standard input."""

from __future__ import annotations

import sys
import time

from twinpool.cluster.arena.shared_weights import SharedImages
from twinpool.contracts.clock import SystemClock
from twinpool.engine.runner.model_image import ImageUnfit


def main() -> None:
    images = SharedImages(sys.argv[1], 0.1, SystemClock(), time.sleep)
    try:
        image = images.find(sys.argv[2])
        print("is to make it" if image is None else f"has {bytes(image[-4:]).decode()}", flush=True)
    except ImageUnfit as error:
        print(error, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
