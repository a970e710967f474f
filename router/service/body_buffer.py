"""A budget for the bytes of request bodies that are being received."""

from __future__ import annotations

from router.openai.api_errors import BufferFull


class BodyBuffer:
    """Counts the memory of all bodies between their first byte and their admission."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Raises `BufferFull`, with nothing taken."""
        if self.held + size > self.limit:
            raise BufferFull(f"bodies of {self.held} bytes are being received; try again later")
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size
