"""The choices of large requests on their way to the router core: a share of one request's in each turn of the loop.

To place a choice takes up to a millisecond, and a request may have as many as `router.max_queue`: placed at once, they
would hold up every stream of the router. They are booked from the beginning on, so that each has its place whenever its
share comes; those whose client leaves meanwhile are never placed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from twinpool.contracts.ids import RequestId
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import ResponseStream

SHARE = 8
"""Choices that are placed in one turn. A request that has no more is placed at once."""


class ChoiceShares:
    """The choices of one router that wait for their share; used on its event loop."""

    def __init__(
        self,
        lives: Callable[[RequestId], bool],
        place: Callable[[Sequence[ChoiceOutput]], object],
        fail: Callable[[ResponseStream], object],
    ) -> None:
        """`lives`: whether a choice has not ended. `place` hands choices to the router core, and `fail` ends an answer
        of which it couldn't."""
        self._lives, self._place, self._fail = lives, place, fail
        self._waiting: deque[tuple[ResponseStream, deque[ChoiceOutput]]] = deque()
        self._due = False

    def enter(self, stream: ResponseStream, choices: Sequence[ChoiceOutput]) -> None:
        """Place an answer's choices: a share of them now, and the others in the turns after this, among those of other
        answers. Raises as `place` does."""
        self._place(choices[:SHARE])
        if len(choices) > SHARE:
            self._waiting.append((stream, deque(choices[SHARE:])))
            self._later()

    def ids(self) -> Iterator[RequestId]:
        """The choices that wait and have not ended."""
        for _, choices in self._waiting:
            yield from (choice.request.id for choice in choices if self._lives(choice.request.id))

    def _later(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        stream, choices = self._waiting.popleft()
        share: list[ChoiceOutput] = []
        while choices and len(share) < SHARE:
            choice = choices.popleft()
            if self._lives(choice.request.id):
                share.append(choice)
        if choices:
            self._waiting.append((stream, choices))
        if self._waiting:
            self._later()
        try:
            self._place(share)
        except Exception:  # Our own bug: this answer ends, others go on.
            self._fail(stream)
