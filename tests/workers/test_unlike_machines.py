"""Workers of two numerics classes, each in a process of its own, as on machines that aren't alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.worker_child import Child, worker_child
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.ids import RequestId, Role, RoomId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = tuple(range(3, 43))
OLD, NEW = processor.LEVELS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("unlike") / "model")


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """What a process that is started within finds set."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextmanager
def pair(model: Path, levels: tuple[str, str]) -> Iterator[tuple[Child, Child]]:
    """A prefill and a decode worker; the machine of the first has weaker instructions than that of the second."""
    sections = [{"transfer": {"plane": "zmq"}, "engine": {"threads": 1, "numerics_class": level}} for level in levels]
    with environment(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41"):
        prefill = worker_child(model, Role.PREFILL, "prefill-0", sections[0], 512, fresh=True)
        first = prefill.__enter__()
    try:
        with worker_child(model, Role.DECODE, "decode-0", sections[1], 512, fresh=True) as second:
            yield first, second
    finally:
        prefill.__exit__(None, None, None)


def ask(prefill: Child, decode: Child) -> list[Event]:
    """Everything that both say, until the request has ended on decode, or on both in an error."""
    submit = Submit(RequestId("a"), 0, RoomId("room-a"), PROMPT, len(PROMPT), SAMPLING, prefill.ref)
    decode.handle(submit)
    prefill.handle(Submit(RequestId("a"), 0, RoomId("room-a"), PROMPT, len(PROMPT), SAMPLING, decode.ref))
    said: list[Event] = []
    deadline = time.monotonic() + 60
    while not any(isinstance(event, Done) for event in said):
        assert time.monotonic() < deadline, "nothing came of it within 60 s"
        decode.pipe.poll(0.05)
        said += [*prefill.events(), *decode.events()]
    return said


def needs(level: str) -> None:
    if level not in processor.levels():
        pytest.skip(f"this processor can't run {level}")


@pytest.mark.slow
def test_a_hand_over_between_classes_is_refused_with_both_in_the_message(model: Path) -> None:
    needs(NEW)
    with pair(model, (OLD, NEW)) as both:
        said = ask(*both)
    (done, *_) = [event for event in said if isinstance(event, Done)]
    assert done.reason == "error"
    for part in (f"native-{OLD}", f"native-{NEW}", "prefill-0", "decode-0", "engine.numerics_class"):
        assert part in done.message, done.message
    assert not any(isinstance(event, Tokens) and event.position > len(PROMPT) for event in said)


@pytest.mark.slow
def test_one_level_for_all_makes_one_class_of_unlike_machines(model: Path) -> None:
    """The first process is told by its environment to compute as an older machine; the level overrules it."""
    needs(OLD)
    with pair(model, (OLD, OLD)) as both:
        said = ask(*both)
    by_position = {
        event.position + i: t for event in said if isinstance(event, Tokens) for i, t in enumerate(event.tokens)
    }
    answer = [by_position[len(PROMPT) + i] for i in range(8)]
    assert compare(Oracle(model), list(PROMPT), answer).equal
