"""Answers in OpenAI's shapes, written by hand: a streamed chunk costs a few string joins.

Extensions: `stop_reason`, `token_ids` and `prompt_token_ids` as in vLLM (the stop token is among `token_ids`), and the
field `twinpool` for requests that carry the timeline header. `prompt_token_ids` stands in the choice, in a stream in
the first chunk of each choice; chat answers have it beside `choices` as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from contracts.sampling import TokenLogprob
from router.asks import Ask
from router.choice import Choice, Piece
from router.text import TextCodec

_dumps = json.JSONEncoder(separators=(",", ":")).encode


class Answer:
    """The shape of one HTTP answer."""

    def __init__(self, ask: Ask, answer_id: str, created: int, model: str, codec: TextCodec) -> None:
        self._ask = ask
        self._codec = codec
        self._choices: list[Choice] = []
        self._offsets: dict[int, int] = {}
        prefix = "chatcmpl" if ask.chat else "cmpl"
        self._common = {"id": f"{prefix}-{answer_id}", "created": created, "model": model}
        kind = "chat.completion" if ask.chat else "text_completion"
        self._object = kind
        chunk = kind + ".chunk" if ask.chat else kind
        self._head = "data: " + _dumps({**self._common, "object": chunk})[:-1]
        self._tail = ',"usage":null}\n\n' if ask.include_usage else "}\n\n"

    def bind(self, choices: list[Choice]) -> None:
        self._choices = choices

    # ------------------------------------------------------------ streamed

    def chunk(self, piece: Piece) -> bytes:
        """The event of `piece`; empty when it would say nothing."""
        ask = self._ask
        text, logprobs = piece.text, None
        choice = self._choices[piece.index]
        if piece.first and ask.echo:
            text = choice.prompt_text + text
        if ask.logprobs is not None:
            logprobs = self._logprobs(choice, piece.logprobs, echo=piece.first and ask.echo)
        has_news = text or piece.finish or (piece.tokens and (ask.return_token_ids or logprobs)) or piece.first
        if not has_news:
            return b""
        finish = f'"{piece.finish}"' if piece.finish else "null"
        stop = f',"stop_reason":{_dumps(piece.stop)}' if piece.finish else ""
        ids = extra = ""
        if ask.return_token_ids:
            ids = f',"token_ids":{_dumps(list(piece.tokens))}'
            if piece.first:
                prompt = f',"prompt_token_ids":{_dumps(choice.request.prompt)}'
                ids, extra = ids + prompt, prompt if ask.chat else ""
        if ask.chat:
            role = '"role":"assistant",' if piece.first else ""
            body = f'"delta":{{{role}"content":{_dumps(text)}}}'
        else:
            body = f'"text":{_dumps(text)}'
        tail = f',"usage":{_dumps(self.usage())}}}\n\n' if ask.continuous_usage else self._tail
        shown = _dumps(logprobs) if logprobs else "null"
        return (
            f'{self._head},"choices":[{{"index":{piece.index},{body},"logprobs":{shown}'
            f',"finish_reason":{finish}{stop}{ids}}}]{extra}{tail}'
        ).encode()

    def closing(self, twinpool: object | None) -> bytes:
        """What comes after the last chunk: the usage, the timeline, and ``[DONE]``."""
        if not self._ask.include_usage and twinpool is None:
            return b"data: [DONE]\n\n"
        event: dict[str, Any] = {"choices": []}
        if self._ask.include_usage:
            event["usage"] = self.usage()
        if twinpool is not None:
            event["twinpool"] = twinpool
        return f"{self._head},{_dumps(event)[1:]}\n\ndata: [DONE]\n\n".encode()

    # ------------------------------------------------------------ whole

    def whole(self, twinpool: object | None) -> bytes:
        """The answer in one piece."""
        tree: dict[str, Any] = {**self._common, "object": self._object}
        tree["choices"] = [self._whole_choice(c) for c in self._choices]
        if self._ask.chat and self._ask.return_token_ids:
            tree["prompt_token_ids"] = self._choices[0].request.prompt
        tree["usage"] = self.usage()
        if twinpool is not None:
            tree["twinpool"] = twinpool
        return _dumps(tree).encode()

    def _whole_choice(self, c: Choice) -> dict[str, Any]:
        ask = self._ask
        text = (c.prompt_text if ask.echo else "") + "".join(c.text)
        shape: dict[str, Any] = {"index": c.index}
        if ask.chat:
            shape["message"] = {"role": "assistant", "content": text}
        else:
            shape["text"] = text
        logprobs = self._logprobs(c, c.logprobs, echo=ask.echo) if ask.logprobs is not None else None
        shape |= {"logprobs": logprobs, "finish_reason": c.finish, "stop_reason": c.stop}
        if ask.return_token_ids:
            shape |= {"token_ids": c.tokens, "prompt_token_ids": c.request.prompt}
        return shape

    def usage(self) -> dict[str, Any]:
        """Counts so far. A prompt counts once, however many answers it has."""
        firsts = self._choices[:: self._ask.n]
        prompt = sum(len(c.request.prompt) for c in firsts)
        completion = sum(len(c.tokens) for c in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
        }

    # ------------------------------------------------------------ log-probabilities

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], *, echo: bool) -> dict[str, Any] | None:
        if self._ask.chat:
            return {"content": [self._chat_logprob(t) for t in logprobs]} if logprobs else None
        entries: list[tuple[int, TokenLogprob | None]] = []
        if echo:
            prompt = choice.request.prompt
            entries.append((prompt[0], None))
            entries += zip(prompt[1:], choice.scores, strict=True)
        entries += [(t.token, t) for t in logprobs]
        if not entries:
            return None
        offset = self._offsets.get(choice.index, 0 if self._ask.echo else len(choice.prompt_text))
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scored in entries:
            text = self._codec.token_text(token)
            shape["tokens"].append(text)
            shape["token_logprobs"].append(None if scored is None else _finite(scored.logprob))
            shape["top_logprobs"].append(None if scored is None else self._top(scored))
            shape["text_offset"].append(offset)
            offset += len(text)
        self._offsets[choice.index] = offset
        return shape

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._codec.token_text(token), _finite(value))
        return top

    def _chat_logprob(self, scored: TokenLogprob) -> dict[str, Any]:
        wanted = self._ask.logprobs or 0
        entry = self._chat_token(scored.token, scored.logprob)
        entry["top_logprobs"] = [self._chat_token(token, value) for token, value in scored.top[:wanted]]
        return entry

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def _finite(value: float) -> float:
    """JSON has no infinities; OpenAI writes −9999."""
    return value if math.isfinite(value) else -9999.0
