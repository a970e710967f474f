"""Events of a stream with several choices, whose client comes back more than once."""

from __future__ import annotations

from twinpool.router.openai.request_headers import SeenEvents, read_resume_headers
from twinpool.router.openai.response_stream import NumberedEvents

CREATED = 1_700_000_000


def told(stream: NumberedEvents, *events: tuple[int, str]) -> tuple[list[str], SeenEvents | None]:
    """The events that a client gets of these (choice, text), and what the last one's id says that it has."""
    texts: list[str] = []
    seen = None
    for choice, text in events:
        for event in stream.number(choice, f"data: {text}\n\n".encode()).decode().split("\n\n")[:-1]:
            number, data = event.splitlines()
            texts.append(data.removeprefix("data: "))
            headers = read_resume_headers("key", number.removeprefix("id: "))
            seen = headers.seen if headers is not None else None
    return texts, seen


def test_a_client_that_comes_back_twice_gets_each_event_of_each_choice_once() -> None:
    first, seen = told(NumberedEvents(CREATED, 2, None), (0, "a0"), (1, "b0"), (1, "b1"))
    assert (first, seen) == (["a0", "b0", "b1"], SeenEvents(CREATED, (1, 2)))
    # The other choice hasn't come again yet when the connection breaks a second time.
    second, seen = told(NumberedEvents(CREATED, 2, seen), (0, "a0"), (0, "a1"))
    assert (second, seen) == (["a1"], SeenEvents(CREATED, (2, 2)))
    third, seen = told(NumberedEvents(CREATED, 2, seen), (1, "b0"), (1, "b1"), (0, "a0"), (1, "b2"), (0, "a1"))
    assert (third, seen) == (["b2"], SeenEvents(CREATED, (2, 3)))
