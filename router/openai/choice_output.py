"""The output of one choice: ordered tokens in, text for the client out.

Tokens pass the detokenizer and the stop matcher one by one, so that the text, the token count and the end of an answer
don't depend on how the workers grouped the tokens. The stop token that ends an answer counts and is among the token
ids; its text is shown only with `include_stop_str_in_output`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.outside_data import read_json
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.parsers.answer_parts import (
    AnswerPart,
    ArgumentsOfCalls,
    ArgumentsPart,
    CallPart,
    ContentPart,
    MarkTokens,
    ReasoningPart,
    joined,
    made_whole,
)
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.detokenizer import Detokenizer, NoText, StopMatcher
from twinpool.router.text.tokenizer import ModelTokenizer


class OutputDelta(msgspec.Struct):
    """The part of a choice that one event added; `finish` (``stop`` or ``length``) is set in the last one."""

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: str | None = None
    stop: str | int | None = None
    """The stop string or stop token id that ended the choice; None for the model's end token and for ``length``."""
    first: bool = False
    """Whether this is the choice's first delta, with which the role and the prompt are sent."""
    parts: Sequence[AnswerPart] | None = None
    """What `text` was found to be; None where nothing was looked for."""


class ChoiceOutput:
    """The state of one choice: its tokens, text and end so far. Times are seconds of the service's clock."""

    __slots__ = (
        "_arguments",
        "_asks_for_json",
        "_detokenizer",
        "_eos",
        "_first_due",
        "_found",
        "_left_out",
        "_mark_of",
        "_mark_tokens",
        "_matcher",
        "_min_tokens",
        "_parser",
        "_plain",
        "ended_at",
        "error",
        "finish",
        "first_at",
        "first_count",
        "index",
        "last_at",
        "logprobs",
        "parts",
        "prompt_text",
        "reasoning_tokens",
        "request",
        "scores",
        "stop",
        "text",
        "tokenise_s",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        request: RoutedRequest,
        generate_request: GenerateRequest,
        model_tokenizer: ModelTokenizer,
        prompt_text: str,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt_text = prompt_text
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: tuple[TokenLogprob, ...] = ()
        """Log-probabilities of the prompt's tokens from the second on, where asked for."""
        self.text: list[str] = []
        self.parts: list[AnswerPart] | None = None
        """What its text was found to be so far; None where nothing is looked for."""
        self._found: list[AnswerPart] = []
        self.reasoning_tokens = 0
        """Tokens up to the one with which the latest piece of reasoning was told."""
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.error: Done | None = None
        self.first_at = self.last_at = self.ended_at = 0.0
        self.first_count = 0
        """Tokens of the first delivery."""
        self.tokenise_s = 0.0
        looked_for = generate_request.answer_format
        self._parser = looked_for.parser() if looked_for is not None else None
        self._arguments = ArgumentsOfCalls()
        marks = looked_for.marks if looked_for is not None else frozenset[str]()
        self._mark_of = {model_tokenizer.marks[mark]: mark for mark in marks if mark in model_tokenizer.marks}
        """Tokens that are marks of what is looked for."""
        self._mark_tokens = MarkTokens(self._mark_of.values())
        if self._parser is not None:
            self.parts = []
        self._detokenizer: Detokenizer = NoText()
        if generate_request.shape != "tokens":
            self._detokenizer = model_tokenizer.detokenizer(
                request.prompt, skip_special=generate_request.skip_special_tokens, shown=marks
            )
        self._matcher = StopMatcher(generate_request.stops, include=generate_request.include_stop)
        asks_for_calls = looked_for is not None and looked_for.tool_format
        self._asks_for_json = not asks_for_calls and '"json_schema"' in request.sampling.grammar
        stop_ids = request.sampling.stop_token_ids
        self._left_out = frozenset[int]() if generate_request.include_stop else frozenset(stop_ids)
        """Tokens whose text isn't shown."""
        self._eos = generate_request.eos
        self._min_tokens = request.sampling.min_tokens
        self._first_due = True
        self._plain = self._parser is None and not generate_request.stops and not self._mark_of
        """Whether it has no stop strings, and its text is looked for nothing."""

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> OutputDelta:
        """Take the next tokens and their log-probabilities; returns what they add.

        The delta has `finish` set when a stop string matched: tokens after the match are dropped, and the choice takes
        nothing more. One that matched within the arguments of a call, or within an object that was asked for, cuts the
        answer off as `max_tokens` does: `finish` is "length" then.
        """
        if not self._plain:
            return self._take_each(tokens, logprobs)
        left_out = self._left_out
        text = self._detokenizer.feed_all(
            tokens if left_out.isdisjoint(tokens) else [token for token in tokens if token not in left_out]
        )
        self.tokens.extend(tokens)
        if text:
            self.text.append(text)
        first, self._first_due = self._first_due, False
        if logprobs or first:
            self.logprobs.extend(logprobs)
            return OutputDelta(self.index, text, tokens, logprobs, None, None, first)
        return OutputDelta(self.index, text, tokens, logprobs)

    def _take_each(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> OutputDelta:
        """As `take`, of a choice that a stop string may end, or whose text is looked at."""
        shown: list[str] = []
        used = 0
        for token in tokens:
            used += 1
            self.tokens.append(token)
            if token in self._left_out:
                continue
            text = self._detokenizer.feed(token)
            if self._mark_of:
                self._mark_tokens.note(text, self._mark_of.get(token))
            if text and len(self.tokens) > self._min_tokens:
                text = self._matcher.feed(text)
            shown.append(text)
            self._look_at(text)
            if self._matcher.matched is not None:
                self.finish, self.stop = "stop", self._matcher.matched
                break
        logprobs = logprobs[:used]
        self.logprobs.extend(logprobs)
        return self._piece("".join(shown), tokens[:used], logprobs)

    def take_each(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Iterator[OutputDelta]:
        """As `take`, token by token: yields what each adds, until one ends the choice."""
        for number, token in enumerate(tokens):
            yield self.take((token,), logprobs[number : number + 1])
            if self.finish is not None:
                return

    def end(self, done: Done) -> OutputDelta | None:
        """Take the request's end; returns the last delta with the text that was held back, None for an error."""
        if done.error is not None:
            self.error = done
            return None
        last = self._detokenizer.finish()
        self._mark_tokens.note(last, None)
        text = self._matcher.feed(last) + self._matcher.finish()
        self.finish = done.reason
        if self._matcher.matched is not None:
            self.finish, self.stop = "stop", self._matcher.matched
        elif done.stop_token is not None and done.stop_token not in self._eos:
            self.stop = done.stop_token
        self._look_at(text)
        return self._piece(text, (), ())

    def fail(self, message: str, kind: ErrorKind | None = ErrorKind.WORKER) -> None:
        """End the choice with an error of the router's own."""
        self.error = Done(self.request.id, self.request.attempt, "error", error=kind, message=message)

    def _piece(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> OutputDelta:
        if text:
            self.text.append(text)
        first, self._first_due = self._first_due, False
        told = self._told()
        return OutputDelta(self.index, text, tokens, logprobs, self.finish, self.stop, first, told)

    def _look_at(self, text: str) -> None:
        """Take the next text for its parts."""
        if self._parser is None or not text:
            return
        found = list(made_whole(self._parser.feed(self._mark_tokens.take(text))))
        if any(isinstance(part, ReasoningPart) for part in found):
            self.reasoning_tokens = len(self.tokens)
        self._found += found

    def _told(self) -> Sequence[AnswerPart] | None:
        """Return the parts that were found since the last call; None where nothing is looked for."""
        if self._parser is None or self.parts is None:
            if self._matcher.matched is not None and self._asks_for_json and not _is_json("".join(self.text)):
                self.finish = "length"
            return None
        if self.finish is not None:
            self._found += made_whole([*self._parser.feed(self._mark_tokens.finish()), *self._parser.finish()])
        if self._matcher.matched is not None and self._cut_short():
            self.finish = "length"
        found = self._arguments.take(self._found, stopped=self.finish == "stop")
        parts = list(joined(list(found)))
        self._found = []
        self.parts += parts
        return parts

    def _cut_short(self) -> bool:
        """Whether what was found ends before the arguments of the latest call do, or before an object that was asked
        for."""
        content, arguments = "", None
        for part in (*(self.parts or ()), *self._found):
            if isinstance(part, CallPart):
                arguments = ""
            elif isinstance(part, ArgumentsPart):
                arguments = (arguments or "") + part.text
            elif part.text.strip():
                arguments = None
                content += part.text if isinstance(part, ContentPart) else ""
        if arguments is None:
            return self._asks_for_json and not _is_json(content)
        return not _is_json(arguments)

    @property
    def calls(self) -> bool:
        """Whether it calls a tool."""
        return any(isinstance(part, CallPart) for part in self.parts or ())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill found in its cache, by the first report of a prefill leg; 0 without one."""
        report = next((p for p in self.request.progress if p.role == "prefill"), None)
        return min(report.cached_tokens, len(self.request.prompt)) if report else 0


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True
