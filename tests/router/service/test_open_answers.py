"""Answers under way by themselves: whatever ends one of them, what was booked is given back once, and workers are told
what is to become of theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.http_server import DEMO, demo_spec
from tests.router.security.spent_tokens import spent_tokens
from tests.router.stage import Stage
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.key_file import TenantLimits
from twinpool.contracts.messages.kept_answers import AnswerName, Detach
from twinpool.contracts.messages.router_commands import Cancel, Picture, Submit
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.core.router_actions import DeliverTokens, EndRequest, SendCommand
from twinpool.router.metrics.prometheus_metrics import PrometheusMetrics
from twinpool.router.openai.api_errors import ImagesFull, failure_of
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.response_stream import ResponseStream
from twinpool.router.records.kept_records import possible
from twinpool.router.security.tenant_accounts import TenantAccounts
from twinpool.router.service import admission as admission_module
from twinpool.router.service.admission import Admission
from twinpool.router.service.idempotency_keys import AnswerClaim, AnswerClaims, AnswerIdentity
from twinpool.router.service.open_answers import OpenAnswers
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer

LIMITS = TenantLimits(concurrent=9)
WORDS = 40


class Writer:
    """Makes an event of each delta."""

    def bind(self, choices: list[Any]) -> None: ...

    def chunk(self, piece: Any) -> bytes:
        return b"."


@pytest.fixture(scope="module")
def model_tokenizer() -> ModelTokenizer:
    return read_model_tokenizer(DEMO, 10_000)


class Site:
    """The answers of one router whose core has a worker of each role."""

    def __init__(self, model_tokenizer: ModelTokenizer) -> None:
        self.stage, self.tokenizer = Stage(1, 1), model_tokenizer
        self.core = self.stage.core
        self.superseded: list[ResponseStream] = []
        self.metrics, self.tenants = PrometheusMetrics(self.core, "tcp"), TenantAccounts()
        self.claims = AnswerClaims(self.core, self.superseded.append)
        self.admission = Admission(
            demo_spec(),
            RouterConfig(max_queue=100),
            "",
            self.core.workers,
            self.tenants,
            self.metrics,
            self.stage.clock,
        )
        self.over: list[RequestId] = []
        self.answers = OpenAnswers(
            self.core, self.stage.clock, self.admission, self.metrics, self.claims, None,
            lambda stream, choice: self.over.append(choice.request.id), lambda: None,
        )  # fmt: skip

    def begin(
        self,
        choices: int,
        tenant: str = "",
        key: str = "",
        stops: tuple[str, ...] = (),
        buffer: int = 99,
        pixels: int = 0,
    ) -> Any:
        """An answer whose choices are all placed."""
        request: Any = SimpleNamespace(
            stream=True,
            stops=stops,
            include_stop=False,
            skip_special_tokens=True,
            eos=frozenset(),
            answer_format=None,
            shape="openai",
        )
        writer: Any = Writer()
        stream = ResponseStream(
            f"answer-{len(self.over)}-{len(self.answers.owners)}", request, writer, buffer, "client", 60.0, tenant,
            answer_key=key,
        )  # fmt: skip
        made = []
        for number in range(choices):
            routed = self.stage.request(max_tokens=WORDS)
            routed.id = RequestId(f"{stream.id}-{number}")
            routed.pictures = (Picture(1, 1, 1, 1, bytes(pixels)),) if pixels else ()
            routed.name = AnswerName(key, "body", number, 7) if key else None
            made.append(ChoiceOutput(number, routed, _asked(request), self.tokenizer, ""))
        stream.bind(made)
        keys: Any = SimpleNamespace(limits=lambda tenant: LIMITS)
        self.admission.keys = keys if tenant else None
        self.answers.begin(stream, 3)
        if key:
            claim = AnswerClaim(AnswerIdentity(key, "body", stream.id, 1), RequestId("ask"), self.claims.next_turn())
            self.claims._claims[key] = claim
            self.claims.begun(claim, stream)
        for choice in made:
            self.core.submit(choice.request)
        assert {type(command) for _, command in self.commands()} == {Submit}
        assert self.check() == []
        return stream

    def deliver(self, choice: ChoiceOutput, text: str) -> None:
        tokens = tuple(self.tokenizer.encode(text, add_special=False))
        self.answers.deliver(DeliverTokens(choice.request.id, tokens, ()))

    def fails(self, choice: ChoiceOutput, kind: ErrorKind) -> None:
        """The core ends a request with an error."""
        self.core._end(choice.request, Done(choice.request.id, 0, "error", error=kind, message="planted"))
        for action in self.core.take_actions():
            if isinstance(action, EndRequest):
                self.answers.end(action)

    def commands(self) -> list[tuple[str, Any]]:
        return [(a.worker[0], a.command) for a in self.core.take_actions() if isinstance(a, SendCommand)]

    def told(self) -> set[tuple[str, str]]:
        """What workers are told, by the request."""
        return {(type(command).__name__, command.request_id) for _, command in self.commands()}

    def check(self) -> list[str]:
        return [*self.core.check(), *self.answers.check(), *self.claims.check()]

    @property
    def booked(self) -> tuple[int, int, int]:
        """In the room, of tenants, and in the core."""
        return self.admission.booked, self.tenants.places.total(), self.core.requests.in_flight


def _asked(request: Any) -> GenerateRequest:
    asked: GenerateRequest = request
    return asked


def of(stream: ResponseStream, command: type[Any], *left_out: int) -> set[tuple[str, str]]:
    return {(command.__name__, one.request.id) for one in stream.choices if one.index not in left_out}


@pytest.mark.parametrize(("key", "command"), [("", Cancel), ("a key", Detach)])
@pytest.mark.parametrize("slow", [False, True])
def test_whoever_leaves_or_reads_too_slowly_has_its_choices_taken_back_or_left_to_workers_if_it_may_come_back(
    model_tokenizer: ModelTokenizer, key: str, command: type[Any], slow: bool
) -> None:
    site = Site(model_tokenizer)
    other = site.begin(1, "other")
    stream = site.begin(2, "acme", key, buffer=0)
    assert site.booked == (3, 3, 3)
    for _ in range(2):  # The second time there is nothing left to do.
        site.answers.abandon(stream, slow=slow)
    assert site.told() == of(stream, command)
    assert site.booked == (1, 1, 1)
    assert (site.metrics.slow_clients, site.metrics.disconnects) == (int(slow), int(not slow))
    assert sorted(site.over) == sorted(choice.request.id for choice in stream.choices)
    site.answers.deliver(DeliverTokens(stream.choices[0].request.id, (5,), ()))
    assert stream.choices[0].tokens == [], "what is still under way is nobody's"
    site.answers.abandon(other)
    assert site.booked == (0, 0, 0)
    assert site.check() == []


def test_pixels_of_all_answers_in_flight_are_bounded_and_given_back(
    model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "IMAGE_BYTES", 100)
    site = Site(model_tokenizer)
    first, last = site.begin(2, "acme", pixels=40), site.begin(1, "other", pixels=20)
    assert site.admission.pixels == 100
    with pytest.raises(ImagesFull) as full:
        site.begin(1, "other", pixels=1)
    assert site.booked == (3, 3, 3)
    assert site.check() == []
    site.begin(1, "other")  # Text goes on.
    failure = failure_of(full.value)
    assert (failure.status, failure.code, failure.retry_after_s) == (429, "queue_full", 1)
    assert possible(full.value.numbers) == "there was room for 0 bytes of images, it needed 1"
    assert site.metrics.refused_full == 1
    site.fails(first.choices[0], ErrorKind.WORKER)  # The other choice ends with it.
    assert site.admission.pixels == 20
    site.answers.abandon(last)
    site.answers.abandon(last)
    assert site.admission.pixels == 0
    assert site.check() == []
    site.told()
    site.begin(1, "other", pixels=100)


def test_a_full_buffer_is_a_client_that_reads_too_slowly(model_tokenizer: ModelTokenizer) -> None:
    site = Site(model_tokenizer)
    stream = site.begin(2, "acme", buffer=1)
    site.deliver(stream.choices[0], "one")
    assert site.booked == (2, 2, 2)
    site.deliver(stream.choices[1], "two")
    assert site.told() == of(stream, Cancel)
    assert site.booked == (0, 0, 0)
    assert site.metrics.slow_clients == 1
    assert stream.failed is not None
    assert "too slowly" in stream.failed.message


@pytest.mark.parametrize(
    ("kind", "command"), [(ErrorKind.WORKER, Cancel), (ErrorKind.DEADLINE, Cancel), (ErrorKind.SUPERSEDED, Detach)]
)
def test_a_choice_that_fails_takes_those_of_its_answer_with_it_and_no_others(
    model_tokenizer: ModelTokenizer, kind: ErrorKind, command: type[Any]
) -> None:
    """Where another router has one of them its client is there, and what else there is of the answer is left for it."""
    site = Site(model_tokenizer)
    stream, other = site.begin(3, "acme", "a key"), site.begin(1, "other")
    site.stage.clock.advance(3.0)
    site.fails(stream.choices[1], kind)
    assert site.told() == of(stream, command, 1)
    assert site.booked == (1, 1, 1)
    assert stream.failed is not None
    assert (stream.failed.error, stream.over, other.over) == (kind, True, False)
    # What is told of the others, in records and traces, is no client that left.
    now = site.stage.clock.now()
    assert [(choice.error.error, choice.ended_at) for choice in stream.choices if choice.error] == [(kind, now)] * 3
    assert site.check() == []
    assert sorted(site.over) == sorted(choice.request.id for choice in stream.choices)


def test_an_answer_ends_choice_by_choice_and_each_gives_back_its_own(model_tokenizer: ModelTokenizer) -> None:
    site = Site(model_tokenizer)
    stream = site.begin(3, "acme", stops=("two",))
    site.deliver(stream.choices[0], "one two three")
    assert site.told() == of(stream, Cancel, 1, 2), "a stop string: its workers would go on"
    assert (stream.choices[0].finish, stream.choices[0].text) == ("stop", ["one "])
    assert site.booked == (2, 2, 2)
    choice = stream.choices[1]
    site.core._end(choice.request, Done(choice.request.id, 0, "length"), (Role.PREFILL, Role.DECODE))
    for action in site.core.take_actions():
        if isinstance(action, EndRequest):
            site.answers.end(action)
    assert (choice.finish, stream.over) == ("length", False)
    assert site.booked == (1, 1, 1)
    site.answers.abandon(stream)
    assert site.told() == of(stream, Cancel, 0, 1)
    assert site.booked == (0, 0, 0)
    assert site.check() == []


def test_a_fault_in_one_answers_text_ends_it_alone(
    model_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(model_tokenizer)
    stream, other = site.begin(2, "acme"), site.begin(1)

    def broken(self: ChoiceOutput, tokens: Any, logprobs: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(ChoiceOutput, "take", broken)
        site.deliver(stream.choices[0], "one")
    assert site.told() == of(stream, Cancel)
    assert stream.failed is not None
    assert stream.failed.error is ErrorKind.WORKER
    assert site.booked == (1, 0, 1)
    site.deliver(other.choices[0], "one")
    assert "".join(other.choices[0].text) == "one"
    assert site.check() == []


def test_tokens_are_spent_of_the_tenant_that_asked_and_of_no_other(model_tokenizer: ModelTokenizer) -> None:
    site = Site(model_tokenizer)
    mine, nobodys, theirs = site.begin(1, "acme"), site.begin(1), site.begin(1, "other")
    for stream, text in ((mine, "one two three"), (nobodys, "one"), (theirs, "four")):
        site.deliver(stream.choices[0], text)
    assert spent_tokens(site.tenants) == {
        "acme": 3 + len(mine.choices[0].tokens),
        "other": 3 + len(theirs.choices[0].tokens),
    }
