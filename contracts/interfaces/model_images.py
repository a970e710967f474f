"""The images of loaded models that the processes of a node share: the port between the engine, which makes and maps
them, and who keeps them."""

from __future__ import annotations

from typing import Protocol

from twinpool.contracts.errors import TwinpoolError


class ImageUnfit(TwinpoolError):
    """Raised where there is no image to be had, or a model can't be one; the text says why."""


class WritableImage(Protocol):
    """An image that is still to be written."""

    nbytes: int

    def write(self, fd: int) -> None:
        """Write it into an empty file; the model that it is of is of no use afterwards. Raises `OSError`."""


class ModelImages(Protocol):
    """Images by key. Where one can't be had, methods raise `ImageUnfit`."""

    def find(self, key: str) -> memoryview | None:
        """The image, mapped read-only for as long as this process lives. None: this process is to load the model, and
        then to `keep` its image or to `give_up`. Waits while another process loads it, within a deadline."""

    def keep(self, key: str, image: WritableImage) -> memoryview:
        """Write the image and share it; returns it mapped. The model's own tensors are emptied, even where it can't be
        kept."""

    def give_up(self, key: str, reason: str) -> None:
        """Say that there will be no image under `key`, so that nobody waits for one. Never raises."""
