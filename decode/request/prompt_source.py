"""The prompt source: where the state of prompts comes from, as the decode scheduler and its worker use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.decode.request.request import DecodeRequest
from twinpool.decode.request.request_outcomes import PromptReceived, RequestFailed, RequestLeft
from twinpool.engine.structured_output.answer_grammar import AnswerGrammar
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.worker.admission_check import AdmissionRefusal


class PromptSource(Protocol):
    """Rooms in which other workers hand prompts over (`decode.transfer_queue.TransferQueue`), or this worker's own
    steps (`colocate.local_prompts.LocalPrompts`)."""

    @property
    def counters(self) -> Mapping[str, float]: ...

    def open(
        self, session: SessionId, submit: Submit, grammar: AnswerGrammar | None
    ) -> DecodeRequest | AdmissionRefusal:
        """Take in a request, whose answer follows `grammar`; returns it, or why it can't be taken."""

    def waits(self, request: DecodeRequest) -> bool:
        """Whether the request waits for state that another one is getting. It holds up no other meanwhile."""

    def preallocate(self, request: DecodeRequest) -> bool:
        """Allocate pages for the request's prompt and its next step, and have the prompt come; False without room, with
        nothing taken."""

    def preempt(self, priority: int) -> DecodeRequest | None:
        """Take the pages of one prompt back, of no higher priority than `priority`; returns its request, or None where
        there is no such prompt."""

    def make_way(self, request: DecodeRequest) -> DecodeRequest | None:
        """Take the pages of one prompt of a tenant that has several on their way back, where `request` is of a tenant
        that has none; returns that prompt's request, or None where no such prompt can give way."""

    def poll(self) -> Iterator[PromptReceived | RequestFailed | RequestLeft | ReceiverOutcome]:
        """Yield what became of prompts, one by one; the caller must act on each before it takes the next."""

    def abort(self, request: DecodeRequest, reason: str) -> LegReport | None:
        """Give up the request's prompt, if it is still on its way. Idempotent. Returns what was done here for the
        prompt, where something was."""
