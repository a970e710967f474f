"""Preparation of requests: a body is parsed and checked, its prompts are rendered, tokenised and hashed.

All of it is plain computation on one body, so that it can run on the router's event loop for a small body and in a
reader process for a large one (`router.tokenizer_pool.tokenizer_pool`). A thread wouldn't do: the standard JSON parser
and some calls of the tokenizer hold the interpreter's lock while they run, and every stream would stand still.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from twinpool.contracts import outside_data
from twinpool.contracts.block_hash import in_vocabulary
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.picture_spec import PICTURE_BYTES
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.image_urls import UrlRules
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.sampling_params import ADAPTER_SALT
from twinpool.router.anthropic.messages_request import read_messages_body
from twinpool.router.openai.chat_format import ChatFormat, tools_fault
from twinpool.router.openai.client_grammar import check_grammar, with_special_marks
from twinpool.router.openai.parse_request import (
    NO_ADAPTERS,
    Adapters,
    ChatMessages,
    GenerateRequest,
    Prompt,
    check_grammar_fits,
    check_model,
    opens_turn,
    read_chat,
    read_completion,
    read_messages,
    read_template_args,
    read_tokens,
)
from twinpool.router.openai.pooled_answers import read_embeddings
from twinpool.router.openai.request_fields import DETOKENIZE, MAX_IGNORED, TOKENIZE, describe, read_fields
from twinpool.router.openai.token_answers import read_generate
from twinpool.router.openai.tools import ToolUse, read_tools
from twinpool.router.openai_responses.responses_request import read_responses, renamed
from twinpool.router.state.prefix_hashes import PAGE_TOKENS, PrefixHashes, prefix_hashes
from twinpool.router.text.chat_template import PicturePart, TextParts, check_open
from twinpool.router.text.pictures import ImageSources, PlacedPicture, expanded, pictures_of, read_pictures
from twinpool.router.text.tokenizer import GuardedText, ModelTokenizer

BODY_BYTES_LEAST = 1024**2
BODY_BYTES_A_POSITION = 32
"""A token id takes up to 8 bytes of a body, a token of text about 5 bytes, and of escaped text four times that."""
BODY_BYTES_IMAGES = 24 * 1024**2
"""For images in base64, where the model takes them."""
BODY_BYTES_MOST = 64 * 1024**2
MAX_CONTAINERS = 65_536
"""Limit on the number of lists and objects in one body."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def body_limit(config: RouterConfig, spec: ModelSpec) -> int:
    """Return the limit on a body in bytes: `router.max_body_bytes`, or if that is 0 one from the model's context."""
    images = BODY_BYTES_IMAGES if _sees(config, spec) else 0
    derived = min(BODY_BYTES_LEAST + BODY_BYTES_A_POSITION * spec.context + images, BODY_BYTES_MOST)
    return config.max_body_bytes or derived


def _sees(config: RouterConfig, spec: ModelSpec) -> bool:
    return spec.pictures is not None and config.max_images > 0


_TRUSTED = ("system", "developer", "assistant")
"""Roles of which the application writes the text, or the model."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenised prompt."""

    tokens: tuple[int, ...]
    text: str
    """The prompt's text as `echo` shows it; empty without `echo`."""
    hashes: PrefixHashes
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A generation request with its tokenised prompts in the order of `request.prompts`; a chat has one prompt."""

    request: GenerateRequest
    prompts: tuple[PreparedPrompt, ...]


class TextAnswer(NamedTuple):
    """The answer of an endpoint that counts or makes tokens."""

    body: bytes
    """JSON."""
    ignored: tuple[str, ...]
    """The fields of the request that have no effect."""


class BodyReader:
    """Reads bodies for one model. Every method raises `RequestError` naming the field or limit at fault, and
    `ImagesWanted` where a body is to be read once more, with images that it names."""

    def __init__(
        self, spec: ModelSpec, model_tokenizer: ModelTokenizer, config: RouterConfig, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """`page_tokens`: of the workers' pages."""
        self._spec = spec
        self._model_tokenizer = model_tokenizer
        self._config = config
        self._page_tokens = page_tokens
        self.adapters: Adapters = NO_ADAPTERS
        """The adapters that are served, by name."""
        self.sees = _sees(config, spec)
        """Whether chats may have images."""
        self.sources = ImageSources(UrlRules(config.image_urls, config.image_url_networks))
        """Where images of the next body may come from besides itself."""
        self._pooling = spec.pooling
        self._chats = ChatFormat(
            model_tokenizer.template_source,
            config.tool_parser,
            config.reasoning_parser,
            tool_prompt=config.tool_prompt,
            traits=model_tokenizer.template_traits,
        )

    def completion(self, raw: bytes, tenant: str = "") -> PreparedRequest:
        return self.prepare(read_completion(self._tree(raw), self._spec, self.adapters), tenant)

    def embeddings(
        self, raw: bytes, tenant: str = "", read: Callable[..., GenerateRequest] = read_embeddings
    ) -> PreparedRequest:
        """Prepare a body with texts of which vectors are made; `read`: `read_embeddings` or `read_classify`."""
        return self.prepare(read(self._tree(raw), self._spec, self._pooling, self.adapters), tenant)

    def pairs(self, read: Callable[..., GenerateRequest], raw: bytes, tenant: str = "") -> PreparedRequest:
        """Prepare a body with pairs of texts; `read`: `read_score` or `read_rerank`."""
        return self.prepare(
            read(self._tree(raw), self._spec, self._pooling, self._model_tokenizer, self.adapters), tenant
        )

    def generate(self, raw: bytes, tenant: str = "") -> PreparedRequest:
        return self.prepare(read_generate(self._tree(raw), self._spec, self.adapters), tenant)

    def chat(self, raw: bytes, tenant: str = "") -> PreparedRequest:
        return self.prepare(read_chat(self._tree(raw), self._spec, self.adapters), tenant)

    def messages(self, raw: bytes, tenant: str = "") -> PreparedRequest:
        read = read_messages_body(self._tree(raw))
        request = _with_ignored(read_chat(read.chat, self._spec, self.adapters), read.ignored)
        return self.prepare(replace(request, shape="anthropic"), tenant)

    def responses(self, raw: bytes, tenant: str = "") -> PreparedRequest:
        read = read_responses(self._tree(raw))
        try:
            request = _with_ignored(read_chat(read.chat, self._spec, self.adapters), read.ignored)
            return self.prepare(replace(request, shape="responses", repeated=json.dumps(read.repeated)), tenant)
        except RequestError as error:
            raise renamed(error) from None

    def input_tokens(self, raw: bytes) -> TextAnswer:
        """Return the answer of ``/v1/responses/input_tokens``."""
        prepared = self.responses(raw)
        told = {"object": "response.input_tokens", "input_tokens": len(prepared.prompts[0].tokens)}
        return TextAnswer(json.dumps(told).encode(), prepared.request.ignored)

    def count_tokens(self, raw: bytes) -> TextAnswer:
        """Return the answer of ``/v1/messages/count_tokens``."""
        read = read_messages_body({"max_tokens": 1, **self._tree(raw)})
        prepared = self.prepare(_with_ignored(read_chat(read.chat, self._spec, self.adapters), read.ignored))
        told = {"input_tokens": len(prepared.prompts[0].tokens)}
        return TextAnswer(json.dumps(told).encode(), prepared.request.ignored)

    def prepare(self, request: GenerateRequest, tenant: str = "") -> PreparedRequest:
        """Render and tokenise the prompts of a checked request, decode its pictures, and hash its blocks.

        `tenant`: who asks; nobody else finds what is cached of it.
        """
        if request.embedding is None and self._pooling.labels:
            message = "this model tells classes and generates no text: ask /classify, /v1/score or /v1/rerank"
            raise RequestError(message, param="model")
        if tenant:
            request = replace(request, salt=f"{tenant}\n{request.salt}")
        elif request.salt.startswith(ADAPTER_SALT):
            raise RequestError(f"cache_salt can't begin with {ADAPTER_SALT}", param="cache_salt")
        if (adapter := request.sampling.adapter) is not None:
            request = replace(request, salt=adapter.salted(request.salt))
        limit = self._config.max_queue
        if request.choices > limit:
            message = f"{request.choices} answers in one request are above the server's queue of {limit}"
            raise RequestError(message, param="n" if request.embedding is None else request.prompt_field)
        parts = pictures_of(request.messages)
        placed = read_pictures(parts, self._spec.pictures, self._config, self.sources) if parts else []
        if sum(len(each.picture.pixels) for each in placed) * request.choices > PICTURE_BYTES:
            raise RequestError(
                f"the images of {request.choices} answers have more than {PICTURE_BYTES >> 20} MiB of pixels: each "
                "answer's prompt is sent with its own",
                param="n",
            )
        prompts: Sequence[Prompt] = request.prompts
        if request.chat:
            prompt = self._render(
                request.messages,
                request.tool_use,
                request.template_args,
                opens=request.add_generation_prompt,
                continues=request.continue_final_message,
            )
            prompts = (prompt,)
            request = self._formatted(request, prompt)
        if request.stops and not self._model_tokenizer.has_text:
            raise RequestError("stop strings need a tokenizer, which this checkpoint lacks", param="stop")
        if field := request.grammar_field:
            if not self._model_tokenizer.has_text:
                raise RequestError(f"{field} needs a tokenizer, which this checkpoint lacks", param=field)
            if wrong := check_grammar(request.sampling.grammar):
                told = tools_fault(request.tool_use) or f"{field} can't be followed: {wrong}"
                raise RequestError(told, param=field)
            request = self._with_special_marks(request)
        prepared = PreparedRequest(request, tuple(self._one(request, p, placed) for p in prompts))
        _check_scores(prepared, self._config.max_prompt_logprobs)
        return prepared

    @property
    def tools(self) -> dict[str, str | None]:
        """How chats have tools, for `/v1/models`."""
        return self._chats.tools

    def _render(
        self, messages: ChatMessages, use: ToolUse | None, args: Mapping[str, Any], *, opens: bool, continues: bool
    ) -> str:
        """Return the text of a chat's prompt."""
        if continues:
            check_open(messages)  # Before a call becomes text, with which an answer could go on.
        messages, guard = self._guarded(messages)
        told = self._chats.messages(messages, use)
        text = self._model_tokenizer.render(told, opens, args, self._chats.shown(use), continues=continues)
        if (spec := self._spec.pictures) is not None and spec.marker and pictures_of(messages):
            text = text.replace(spec.marker, spec.written)
        return GuardedText(text, guard) if guard else text

    def _guarded(self, messages: ChatMessages) -> tuple[ChatMessages, str]:
        """Return the messages with guards within names of special tokens that users and tools wrote, and the guard;
        empty where they wrote none."""
        if not self._config.split_special_tokens or not self._model_tokenizer.has_text:
            return messages, ""
        places = [
            (at, key)
            for at, message in enumerate(messages)
            for key in ("content", "name")
            if message.get("role") not in _TRUSTED and isinstance(message.get(key), str)
        ]
        texts = [messages[at][key] for at, key in places]
        parts = [text.parts if isinstance(text, TextParts) else (text,) for text in texts]
        guarded, guard = self._model_tokenizer.guarded([part for each in parts for part in each])
        if not guard:
            return messages, ""
        changed, left = [dict(message) for message in messages], iter(guarded)
        for (at, key), each, text in zip(places, parts, texts, strict=True):
            new = [
                part if isinstance(part, PicturePart) else guarded for part, guarded in zip(each, left, strict=False)
            ]
            changed[at][key] = TextParts(new) if isinstance(text, TextParts) else new[0]
        return tuple(changed), guard

    def _formatted(self, request: GenerateRequest, prompt: str) -> GenerateRequest:
        """Return a chat with what is to be found in its answers, and with the grammar that this takes."""
        found = self._chats.answer_format(request.tool_use, prompt)
        sampling = request.sampling
        if found is not None and set(self._spec.eos_token_ids) <= set(sampling.stop_token_ids):
            # A call ends the turn, whatever the checkpoint's configuration says.
            marks = self._model_tokenizer.marks
            ends = [marks[mark] for mark in found.ending_marks if mark in marks]
            sampling = structs.replace(sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))))
            request = replace(request, eos=request.eos.union(ends))
        grammar = self._chats.grammar(request.tool_use, found, sampling.grammar)
        if grammar != sampling.grammar:
            check_grammar_fits(self._spec, sampling.allowed_token_ids, request.grammar_field or "tools")
            stops = dict.fromkeys((*sampling.stop_token_ids, *self._spec.eos_token_ids))
            sampling = structs.replace(sampling, grammar=grammar, stop_token_ids=tuple(stops))
        if found is not None and not request.separate_reasoning:
            found = replace(found, reasoning=False) if found.tool_format else None
        field = request.grammar_field or ("tools" if grammar else "")
        return replace(request, answer_format=found, sampling=sampling, grammar_field=field)

    def _with_special_marks(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request whose grammar names the marks of calls and messages that are tokens by their ids."""
        found, marks = request.answer_format, self._model_tokenizer.marks
        tokens = {mark: marks[mark] for mark in (found.marks if found is not None else ()) if mark in marks}
        grammar = with_special_marks(request.sampling.grammar, tokens)
        return replace(request, sampling=structs.replace(request.sampling, grammar=grammar))

    def tokenize(self, raw: bytes) -> TextAnswer:
        """Return the answer of ``/tokenize``."""
        body = self._tree(raw)
        check_model(body, self._spec, self.adapters)
        (values, ignored), prompt = read_fields(body, TOKENIZE), body.get("prompt")
        if body.get("messages") is not None:
            args = read_template_args(body.get("chat_template_kwargs"))
            opens, continues = opens_turn(values), values.get("continue_final_message", False)
            messages = read_messages(body["messages"])
            text = self._render(messages, read_tools(body), args, opens=opens, continues=continues)
            tokens = self._model_tokenizer.encode(
                text, add_special=values.get("add_special_tokens", False), param="messages"
            )
            if parts := pictures_of(messages):
                placed = read_pictures(parts, self._spec.pictures, self._config, self.sources)
                tokens = tuple(in_vocabulary(expanded(tokens, placed), placed[0].picture.token))
        elif isinstance(prompt, str):
            tokens = self._model_tokenizer.encode(prompt, add_special=values.get("add_special_tokens", True))
        else:
            raise RequestError(f"prompt must be a string; got {describe(prompt)}", param="prompt")
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self._spec.context, "tokens": tokens}
        if values.get("return_token_strs"):
            answer["token_strs"] = [self._model_tokenizer.token_piece(t) for t in tokens]
        return TextAnswer(json.dumps(answer).encode(), ignored)

    def detokenize(self, raw: bytes) -> TextAnswer:
        """Return the answer of ``/detokenize``."""
        body = self._tree(raw)
        check_model(body, self._spec, self.adapters)
        _, ignored = read_fields(body, DETOKENIZE)
        tokens = read_tokens(body.get("tokens"), self._spec, "tokens")
        return TextAnswer(json.dumps({"prompt": self._model_tokenizer.decode(tokens)}).encode(), ignored)

    @staticmethod
    def _tree(raw: bytes) -> dict[str, Any]:
        # Brackets within strings don't count; only a body with many brackets is worth the search for strings.
        if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
            bare = _STRING.sub(b"", raw)
            if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
                raise RequestError(f"the body has more than {MAX_CONTAINERS} lists and objects")
        return read_json(raw)

    def _one(self, request: GenerateRequest, prompt: Prompt, placed: Sequence[PlacedPicture] = ()) -> PreparedPrompt:
        param = request.prompt_field
        if isinstance(prompt, str):
            least = self._model_tokenizer.min_tokens(prompt)
            if least > self._spec.context and request.truncate_prompt_tokens is None:
                raise RequestError(
                    f"the prompt has more than {least} tokens; the context has {self._spec.context}", param=param
                )
            tokens = self._model_tokenizer.encode(prompt, add_special=request.add_special_tokens, param=param)
            text = prompt
        else:
            tokens = prompt
            text = ""
            if request.echo and self._model_tokenizer.has_text:
                text = self._model_tokenizer.decode(prompt, skip_special=request.skip_special_tokens)
        if placed:
            if request.truncate_prompt_tokens is not None:
                raise RequestError("a prompt with images is not truncated", param="truncate_prompt_tokens")
            tokens = expanded(tokens, placed)
        if not tokens:
            if self._spec.bos_token_id is None:
                raise RequestError("the prompt is empty, and this model has no token to begin with", param=param)
            tokens = (self._spec.bos_token_id,)
        if request.truncate_prompt_tokens is not None:
            tokens = _last(request, tokens, self._spec.context)
            if request.echo and self._model_tokenizer.has_text:
                text = self._model_tokenizer.decode(tokens, skip_special=request.skip_special_tokens)
        if len(tokens) > self._spec.context:  # Refused here, before it is hashed and sent on.
            raise too_long(len(tokens), self._spec.context, param)
        return PreparedPrompt(
            tokens,
            text if request.echo else "",
            prefix_hashes(tokens, request.salt, self._page_tokens),
            tuple(each.picture for each in placed),
        )


def _last(request: GenerateRequest, tokens: tuple[int, ...], context: int) -> tuple[int, ...]:
    """Return what `truncate_prompt_tokens` keeps of a prompt's tokens: its end."""
    most = request.truncate_prompt_tokens
    if most == -1:
        most = max(1, context - (request.max_tokens or 1))
    return tokens if most is None else tokens[-most:]


def _check_scores(prepared: PreparedRequest, limit: int) -> None:
    """Raise `RequestError` for prompt log-probabilities above `limit`, which is `router.max_prompt_logprobs`.

    They take hundreds of bytes for each position and choice, all of it in one answer.
    """
    wanted = prepared.request.sampling.prompt_logprobs
    if wanted is None:
        return
    named = prepared.request.prompt_logprobs is not None
    times = prepared.request.n if not named or prepared.request.echo else 1
    positions = times * sum(len(p.tokens) for p in prepared.prompts)
    if positions * (wanted + 1) > limit:
        field, asked = ("prompt_logprobs", "") if named else ("logprobs", "echo with ")
        raise RequestError(
            f"{asked}{field} {wanted} over {positions} positions asks for {positions * (wanted + 1)} "
            f"log-probabilities; the limit is {limit}: shorten the prompt or lower {field}",
            param=field,
        )


def _with_ignored(request: GenerateRequest, ignored: tuple[str, ...]) -> GenerateRequest:
    """Return a request with further fields that have no effect."""
    return replace(request, ignored=(ignored + request.ignored)[:MAX_IGNORED])


def too_long(tokens: int, context: int, param: str) -> RequestError:
    """Return the error for a prompt of so many tokens in the field `param`."""
    return RequestError(f"the prompt has {tokens} tokens; the context of {context} has no room for it", param=param)


def read_json(body: bytes) -> dict[str, Any]:
    """Return the request body as an object. Raises `RequestError` for a body that isn't strict JSON, or no object.

    A number beyond all floats, or with more digits than Python reads, is infinite where it is a field's value, so that
    whoever reads the field refuses it with the field's range. Within a field it is refused here, with its place.
    """
    try:
        try:
            tree = outside_data.read_json(body, _read_strictly)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # A number, most likely; this reading tells which.
            tree = outside_data.read_json(body, _read_with_infinities)
            if (place := _infinite_within(tree)) is not None:
                message = f"{'.'.join(place)}: the number is too large to be read"
                raise RequestError(message, param=place[0]) from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"the body must be a JSON object, not {describe(tree)}")
    return tree


def _reads(decoder: json.JSONDecoder) -> Callable[[Any], Any]:
    return lambda body: decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _int_or_infinite(text: str) -> float:
    """Return a number of any length; Python refuses to read longer ones, which takes the square of their length."""
    return int(text) if len(text) <= sys.int_info.str_digits_check_threshold else float(text)


# Made once, as that takes as long as reading a short body.
_read_strictly = _reads(json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite))
_read_with_infinities = _reads(json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_int_or_infinite))


def _infinite_within(tree: object) -> tuple[str, ...] | None:
    """Return the names and numbers that lead to an infinite number within a field of a body; None without one."""
    left: list[tuple[Any, _Place]] = [(tree, None)]
    while left:
        part, place = left.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                left.append((value, (place, key)))
            elif place is not None and isinstance(value, float) and math.isinf(value):
                return _names((place, key))
    return None


_Place = tuple[Any, Any] | None
"""Where something is in a body: the place of what has it, and its name or number there; None: it is the body."""


def _names(place: _Place) -> tuple[str, ...]:
    names: list[str] = []
    while place is not None:
        place, key = place
        names.append(str(key)[:64])
    return tuple(reversed(names))
