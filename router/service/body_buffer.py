"""The memory budget of all request bodies that are being received."""

from __future__ import annotations

from twinpool.router.openai.api_errors import BufferFull


class BodyBuffer:
    """The count of bytes held by bodies between their first byte and their admission; `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Book `size` bytes. Raises `BufferFull`, with nothing booked, where they go beyond the limit."""
        if self.held + size > self.limit:
            text = f"bodies of {self.held} bytes are being received; try again later"
            raise BufferFull(text, size, self.held, self.limit)
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size
