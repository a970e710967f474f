"""Writing of answers in OpenAI's JSON shapes. The JSON is put together by hand: a streamed chunk costs a few joins.

Extensions: `stop_reason`, `token_ids` and `prompt_token_ids` as in vLLM (the stop token is among `token_ids`), and the
field `twinpool` for requests with the header ``X-Twinpool-Timeline: 1``. `prompt_token_ids` is in each choice, in a
stream in the first chunk of each choice; chat answers have it beside `choices` as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twinpool.contracts.compact_json import DATA, DONE, END, compact_json, sse_event
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.openai.choice_output import ChoiceOutput, OutputDelta
from twinpool.router.openai.parse_request import (
    GenerateRequest,
)
from twinpool.router.openai.token_answers import ExpertsFile, finite, prompt_logprobs, usage_of
from twinpool.router.parsers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart
from twinpool.router.text.detokenizer import Detokenizer
from twinpool.router.text.tokenizer import ModelTokenizer


class ChatMessage:
    """One message, told whole or in deltas. The ids of its calls follow from its own."""

    def __init__(self, message_id: str) -> None:
        """`message_id`: no other message's."""
        self._id, self._calls = message_id, 0

    def add(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the delta that tells `parts`, the next ones."""
        shape: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case ContentPart(text):
                    shape["content"] = shape.get("content", "") + text
                case ReasoningPart(text):
                    shape["reasoning_content"] = shape.get("reasoning_content", "") + text
                case CallPart(name):
                    function = {"name": name, "arguments": ""}
                    head = {"index": self._calls, "id": f"call_{self._id}_{self._calls}"}
                    calls.append({**head, "type": "function", "function": function})
                    self._calls += 1
                case ArgumentsPart(text):
                    if not calls:
                        calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        if calls:
            shape["tool_calls"] = calls
        return shape

    def whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the message of all parts."""
        shape = self.add(parts)
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in shape.get("tool_calls", ())
        ]
        message: dict[str, Any] = {"content": shape.get("content", None if calls else "")}
        if "reasoning_content" in shape:
            message["reasoning_content"] = shape["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        return message


_quote = json.encoder.encode_basestring_ascii


def version_of(choices: Sequence[ChoiceOutput]) -> str:
    """Return the version of the weights that an answer is of; empty while it has no workers, or they tell none."""
    return next((choice.request.weights for choice in choices if choice.request.weights), "")


def _weights_of(choices: Sequence[ChoiceOutput]) -> dict[str, str]:
    version = version_of(choices)
    return {"weights_version": version} if version else {}


class ResponseWriter:
    """The writer of one HTTP answer, streamed or whole."""

    def __init__(
        self, request: GenerateRequest, answer_id: str, created: int, model: str, model_tokenizer: ModelTokenizer
    ) -> None:
        self._request = request
        self._model_tokenizer = model_tokenizer
        self._choices: list[ChoiceOutput] = []
        self._places: dict[int, _TextPlace] = {}
        self._messages: dict[int, ChatMessage] = {}
        """By choice, what was told of its message so far."""
        self._prompts: dict[tuple[int, str], bytes] = {}
        self._plain = (
            request.logprobs is None
            and not request.return_token_ids
            and not request.continuous_usage
            and request.answer_format is None
        )
        """Whether events between a choice's first and last carry nothing but text."""
        self._starts: list[str] = []
        self._id = answer_id
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._common = {"id": f"{prefix}-{answer_id}", "created": created, "model": model}
        self._object = "chat.completion" if request.chat else "text_completion"
        self._head = ""
        """How each event begins; made with the first one, when it is known whose weights the answer is of."""
        self._tail = (',"usage":null}' if request.include_usage else "}") + END
        self._end = f'{"}" if request.chat else ""},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def bind(self, choices: list[ChoiceOutput]) -> None:
        """Set the choices; called once, before anything is written."""
        self._choices = choices

    def _begin(self) -> None:
        request = self._request
        chunk = self._object + ".chunk" if request.chat else self._object
        shape = {**self._common, "object": chunk, **_weights_of(self._choices)}
        self._head = DATA + compact_json(shape)[:-1]
        body = '"delta":{"content":' if request.chat else '"text":'
        self._starts = [f'{self._head},"choices":[{{"index":{c.index},{body}' for c in self._choices]

    # ------------------------------------------------------------ streamed

    def chunk(self, piece: OutputDelta) -> bytes | tuple[bytes, ...]:
        """Return the event of a delta: empty when it would carry nothing, in parts when it carries the prompt."""
        if self._plain and piece.finish is None and not piece.first:  # nearly all of them
            return f"{self._starts[piece.index]}{_quote(piece.text)}{self._end}".encode() if piece.text else b""
        request = self._request
        if not self._head:
            self._begin()
        text, logprobs = piece.text, None
        choice = self._choices[piece.index]
        tells_prompt = piece.first and (request.echo or request.return_token_ids)
        if request.logprobs is not None:
            logprobs = self._logprobs(choice, piece.logprobs, echo=piece.first and request.echo)
        shows = text if piece.parts is None else piece.parts
        has_news = shows or piece.finish or (piece.tokens and (request.return_token_ids or logprobs)) or piece.first
        if not has_news:
            return b""
        finish = compact_json(_finish(choice, request)) if piece.finish else "null"
        stop = f',"stop_reason":{compact_json(piece.stop)}' if piece.finish else ""
        ids = f',"token_ids":{compact_json(list(piece.tokens))}' if request.return_token_ids else ""
        tail = f',"usage":{compact_json(self.usage())}}}{END}' if request.continuous_usage else self._tail
        shown = compact_json(logprobs) if logprobs else "null"
        start = f'{self._head},"choices":[{{"index":{piece.index},'
        end = f',"logprobs":{shown},"finish_reason":{finish}{stop}{ids}'
        if tells_prompt:
            begin = (f'"delta":{self._delta(piece)}'.encode(),) if request.chat else self._text(choice, text)
            first = (start.encode(), *begin, end.encode())
            return (
                *first,
                *self._prompt_ids(choice),
                b"}]",
                *(self._prompt_ids(choice) if request.chat else ()),
                tail.encode(),
            )
        if request.chat:
            body = f'"delta":{self._delta(piece)}'
        else:
            body = f'"text":{compact_json(text)}'
        return f"{start}{body}{end}}}]{tail}".encode()

    def _delta(self, piece: OutputDelta) -> str:
        """Return the JSON of what a delta adds to a chat's message."""
        shape: dict[str, Any] = {"role": "assistant"} if piece.first else {}
        if piece.parts is None:
            return compact_json({**shape, "content": piece.text})
        if piece.first:
            shape["content"] = ""
        message = self._messages.setdefault(piece.index, ChatMessage(f"{self._id}_{piece.index}"))
        return compact_json({**shape, **message.add(piece.parts)})

    def _text(self, choice: ChoiceOutput, text: str) -> tuple[bytes, ...]:
        """Return the text of a completion, or of its first event, in parts, after the prompt if that is echoed."""
        if not self._request.echo:
            return (f'"text":{compact_json(text)}'.encode(),)
        return b'"text":"', self._shared(choice, "text"), compact_json(text)[1:].encode()

    def _prompt_ids(self, choice: ChoiceOutput) -> tuple[bytes, ...]:
        if not self._request.return_token_ids:
            return ()
        return b',"prompt_token_ids":', self._shared(choice, "ids")

    def _shared(self, choice: ChoiceOutput, what: str) -> bytes:
        """Return the prompt's JSON (`what`: its ``ids`` or ``text``), which all choices of the prompt share."""
        key = (choice.index // self._request.n, what)
        found = self._prompts.get(key)
        if found is None:
            shape = compact_json(choice.request.prompt) if what == "ids" else compact_json(choice.prompt_text)[1:-1]
            found = self._prompts[key] = shape.encode()
        return found

    def closing(self, twinpool: object | None) -> bytes:
        """Return the end of a stream: an event with the usage and the timeline, where asked for, and ``[DONE]``."""
        if not self._request.include_usage and twinpool is None:
            return sse_event(DONE)
        if not self._head:
            self._begin()
        event: dict[str, Any] = {"choices": []}
        if self._request.include_usage:
            event["usage"] = self.usage()
        if twinpool is not None:
            event["twinpool"] = twinpool
        return f"{self._head},{compact_json(event)[1:]}{END}".encode() + sse_event(DONE)

    @staticmethod
    def failed(failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return sse_event(failure.to_json())

    # ------------------------------------------------------------ whole

    def whole(self, twinpool: object | None) -> list[bytes | ExpertsFile]:
        """Return the body of an answer that isn't streamed, in parts to be sent one after another."""
        shape = {**self._common, "object": self._object, **_weights_of(self._choices)}
        parts: list[bytes | ExpertsFile] = [compact_json(shape)[:-1].encode(), b',"choices":[']
        for c in self._choices:
            parts += (b",{" if c.index else b"{", *self._whole_choice(c), b"}")
        parts.append(b"]")
        if self._request.chat:
            parts += self._prompt_ids(self._choices[0])
        tree: dict[str, Any] = {"usage": self.usage()}
        if self._request.chat and self._request.prompt_logprobs is not None:
            tree["prompt_logprobs"] = _of_prompt(self._choices[0], self._request.prompt_logprobs, self._model_tokenizer)
        if twinpool is not None:
            tree["twinpool"] = twinpool
        parts.append(b"," + compact_json(tree)[1:].encode())
        return parts

    def _whole_choice(self, c: ChoiceOutput) -> list[bytes | ExpertsFile]:
        request = self._request
        shape: dict[str, Any] = {"index": c.index}
        logprobs = self._logprobs(c, c.logprobs, echo=request.echo) if request.logprobs is not None else None
        shape |= {"logprobs": logprobs, "finish_reason": _finish(c, request), "stop_reason": c.stop}
        if request.return_token_ids:
            shape["token_ids"] = c.tokens
        if not request.chat and request.prompt_logprobs is not None:
            shape["prompt_logprobs"] = _of_prompt(
                self._choices[c.index - c.index % request.n], request.prompt_logprobs, self._model_tokenizer
            )
        routed: list[bytes | ExpertsFile] = []
        if request.sampling.routed_experts:
            experts = ExpertsFile(self._choices[c.index - c.index % request.n], c)
            routed = [b',"routed_experts":"', experts, b'"']
        text = "".join(c.text)
        shown = (f'"message":{self._message(c, text)}'.encode(),) if request.chat else self._text(c, text)
        return [*shown, b"," + compact_json(shape)[1:-1].encode(), *routed, *self._prompt_ids(c)]

    def _message(self, choice: ChoiceOutput, text: str) -> str:
        if choice.parts is None:
            return compact_json({"role": "assistant", "content": text})
        return compact_json({"role": "assistant", **ChatMessage(f"{self._id}_{choice.index}").whole(choice.parts)})

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far. A prompt counts once, however many choices it has."""
        return usage_of(self._choices, self._request.n)

    # ------------------------------------------------------------ log-probabilities

    def _logprobs(self, choice: ChoiceOutput, logprobs: Sequence[TokenLogprob], *, echo: bool) -> dict[str, Any] | None:
        if self._request.chat:
            return {"content": [self._chat_logprob(t) for t in logprobs]} if logprobs else None
        entries: list[tuple[int, TokenLogprob | None]] = []
        if echo:
            prompt = choice.request.prompt
            entries.append((prompt[0], None))
            entries += zip(prompt[1:], choice.scores, strict=True)
        entries += [(t.token, t) for t in logprobs]
        if not entries:
            return None
        place = self._places.get(choice.index)
        if place is None:
            place = self._places[choice.index] = self._place(choice)
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scored in entries:
            shape["tokens"].append(self._name(token))
            shape["token_logprobs"].append(None if scored is None else finite(scored.logprob))
            shape["top_logprobs"].append(None if scored is None else self._top(scored))
            shape["text_offset"].append(place.take(token))
        return shape

    def _place(self, choice: ChoiceOutput) -> _TextPlace:
        echo, prompt = self._request.echo, choice.request.prompt
        text = self._model_tokenizer.detokenizer(() if echo else prompt, skip_special=self._request.skip_special_tokens)
        return _TextPlace(text, 0 if echo else len(choice.prompt_text))

    def _name(self, token: int) -> str:
        """The name of a token in the log-probabilities of a completion: its text, or its bytes where these are none."""
        if self._request.tokens_as_ids:
            return f"token_id:{token}"
        raw = self._model_tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """The best tokens and the one that was drawn, by name. Of two tokens of one name the less likely is named by
        its id."""
        values = dict((*scored.top[: self._request.logprobs], (scored.token, scored.logprob)))
        top: dict[str, float] = {}
        for token, value in values.items():
            name = self._name(token)
            top[name if name not in top else f"token_id:{token}"] = finite(value)
        return top

    def _chat_logprob(self, scored: TokenLogprob) -> dict[str, Any]:
        wanted = self._request.logprobs or 0
        entry = self._chat_token(scored.token, scored.logprob)
        entry["top_logprobs"] = [self._chat_token(token, value) for token, value in scored.top[:wanted]]
        return entry

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        raw = self._model_tokenizer.token_bytes(token)
        name = f"token_id:{token}" if self._request.tokens_as_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": finite(value), "bytes": list(raw)}


def _of_prompt(first: ChoiceOutput, best: int, tokenizer: ModelTokenizer) -> list[dict[str, Any] | None]:
    """The log-probabilities of the prompt of its `first` choice, by `prompt_logprobs`."""
    return prompt_logprobs(first, best, lambda token: tokenizer.token_bytes(token).decode("utf-8", "replace"))


class _TextPlace:
    """Where the text of a choice's tokens begins, in characters of the text with the prompt before it."""

    def __init__(self, detokenizer: Detokenizer, begin: int) -> None:
        self._detokenizer, self._at = detokenizer, begin

    def take(self, token: int) -> int:
        """Return where the next token begins. One that doesn't complete a character begins where the next one does."""
        begin = self._at
        self._at += len(self._detokenizer.feed(token))
        return begin


def _finish(choice: ChoiceOutput, request: GenerateRequest) -> str | None:
    """Return why a choice ended, in OpenAI's words: what calls a tool that the request names ends with ``stop``."""
    calls = choice.finish == "stop" and choice.calls and not request.tool_named
    return "tool_calls" if calls else choice.finish
