"""The checkpoint's tokenizer: text to tokens and back, chat prompts, and the bytes of a single token.

All requests and threads share one `ModelTokenizer`; after construction it only fills caches.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from twinpool.contracts.checkpoint.tokenizer_files import TOKENIZER, read_tokenizer_files
from twinpool.contracts.errors import CheckpointError, RequestError
from twinpool.contracts.grammar import is_mark
from twinpool.router.text.chat_template import ChatTemplate, TemplateTraits, cut_at_mark, marked, read_chat_template
from twinpool.router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    NoText,
    WindowDetokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_IDS = 'send /v1/completions a "prompt" of token ids, and "return_token_ids": true for those of the answer'
NO_TOKENIZER = f"this checkpoint has no tokenizer.json, so there is no text: {_IDS}"
NO_CHAT = f"this checkpoint has no tokenizer.json, so there are no chats: {_IDS}"
NO_IDS_OF_TEXT = "this checkpoint has no tokenizer.json: text and token ids can't be made into each other here"
NO_TEMPLATE = 'this checkpoint has no chat template: send /v1/completions the text as "prompt"'


NAME_CHARS = 256
"""The longest name of a token that is looked for in the texts of a chat."""
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode assigns to nothing: one that the texts of a chat don't have stands within names of tokens in
them, until they are tokenised."""


class GuardedText(str):
    """A prompt in which `guard` stands behind the first character of each name of a token that is to be text."""

    __slots__ = ("guard",)
    guard: str

    def __new__(cls, text: str, guard: str) -> GuardedText:
        made = super().__new__(cls, text)
        made.guard = guard
        return made


class _TokenBytes(dict[int, bytes]):
    """The bytes of tokens, each read when it is first asked for."""

    def __init__(self, read: Callable[[int], bytes], known: Mapping[int, bytes] = MappingProxyType({})) -> None:
        super().__init__(known)
        self._read = read

    def __missing__(self, token: int) -> bytes:
        found = self[token] = self._read(token)
        return found


class ModelTokenizer:
    """A checkpoint's tokenizer and chat template; `tree` is the content of its `tokenizer.json`.

    Without `tokenizer` text is refused and answers have tokens only.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, tree: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._byte_level = _is_byte_level(tree.get("decoder"))
        self._special_names = {t["content"]: t["id"] for t in tree.get("added_tokens", ()) if t.get("special")}
        self._marks = {t["content"]: t["id"] for t in tree.get("added_tokens", ()) if is_mark(t)}
        self._names = _any_of([name for name in self._marks if 1 < len(name) <= NAME_CHARS])
        self._special = set(self._special_names.values())
        self._fallback: dict[int, int] = {}
        """Of a tokenizer with byte fallback the tokens that are bytes, with the byte."""
        self._bytes = _TokenBytes(self._read_bytes)
        self._shown = _TokenBytes(self.token_bytes, {token: b"" for token in self._special})
        self._longest = 0
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if _falls_back(tree.get("decoder")) and not self._byte_level:
                found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
                self._fallback = {token: byte for byte, token in enumerate(found) if token is not None}
            if _keeps_all_text(tree):
                # After NFC a composed character stands for up to four characters of the text.
                shrink = 4 if tree.get("normalizer") else 1
                self._longest = shrink * max((len(piece) for piece in tokenizer.get_vocab()), default=0)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @property
    def marks(self) -> Mapping[str, int]:
        """The ids of added tokens that grammars know by their ids, by their names (`contracts.grammar.is_mark`)."""
        return self._marks

    def encode(self, text: str, *, add_special: bool, param: str = "prompt") -> tuple[int, ...]:
        """Return the token ids of `text`; `add_special` has the tokenizer add its special tokens.

        Raises `RequestError`, naming the field `param`, without a tokenizer or for text with lone surrogates.
        """
        if self._tokenizer is None:
            raise RequestError(NO_TOKENIZER, param=param)
        try:
            # The batch call releases the interpreter's lock, and the fast one computes no offsets.
            found = tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
            return self._without_guards(found, text, add_special) if isinstance(text, GuardedText) else found
        except (UnicodeError, TypeError):
            raise RequestError("the text holds lone surrogates, which no Unicode text has", param=param) from None

    def encode_pair(self, first: str, second: str, *, add_special: bool, param: str) -> tuple[int, ...]:
        """Return the token ids of two texts as the tokenizer joins them; raises as `encode` does."""
        if self._tokenizer is None:
            raise RequestError(NO_TOKENIZER, param=param)
        try:
            return tuple(self._tokenizer.encode_batch_fast([(first, second)], add_special_tokens=add_special)[0].ids)
        except (UnicodeError, TypeError):
            raise RequestError("the text holds lone surrogates, which no Unicode text has", param=param) from None

    def guarded(self, texts: Sequence[str]) -> tuple[list[str], str]:
        """Return texts with a guard within each name of a special token or a mark, and the guard; empty where they have
        none."""
        names = self._names
        if names is None or not any(map(names.search, texts)):
            return list(texts), ""
        guard = next((each for each in GUARDS if not any(each in text for text in texts)), "")
        if not guard:
            raise RequestError("messages have every character that Unicode assigns to nothing", param="messages")
        return [names.sub(lambda name: name[0][0] + guard + name[0][1:], text) for text in texts], guard

    def _without_guards(self, tokens: tuple[int, ...], text: GuardedText, add_special: bool) -> tuple[int, ...]:
        """Return the tokens of a guarded text without the guards'. Where a guard shares a token with other text,
        what stands between the guards is tokenised piece by piece."""
        guard, left, kept, at = text.guard.encode(), text.count(text.guard), [], 0
        while at < len(tokens):
            end, found = at, b""
            while end < len(tokens) and len(found) < len(guard) and guard.startswith(found):
                found += self.token_bytes(tokens[end])
                end += 1
            if found == guard:
                at, left = end, left - 1
            else:
                kept.append(tokens[at])
                at += 1
        if left == 0:
            return tuple(kept)
        first, *others = text.split(text.guard)
        pieces = [self.encode(first, add_special=add_special), *(self.encode(t, add_special=False) for t in others)]
        return tuple(itertools.chain.from_iterable(pieces))

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenising; 0 where none is known."""
        return len(text) // self._longest if self._longest else 0

    @property
    def template_source(self) -> str:
        """The chat template's text, empty without one."""
        return self._template.source if self._template is not None else ""

    @property
    def template_traits(self) -> TemplateTraits:
        """What the chat template does with tools and system messages; it is rendered to find out."""
        return self._template.traits() if self._template is not None else TemplateTraits()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        continues: bool = False,
    ) -> str:
        """Return the text of a chat's prompt; `extra` are the client's `chat_template_kwargs`. `continues`: the prompt
        ends with the last message's text.

        Raises `RequestError` without a tokenizer or template, or where the template refuses the messages.
        """
        if self._tokenizer is None:
            raise RequestError(NO_CHAT, param="messages")
        if self._template is None:
            raise RequestError(NO_TEMPLATE, param="messages")
        if continues:
            return cut_at_mark(self._template.render(marked(messages), add_generation_prompt, extra, tools))
        return self._template.render(messages, add_generation_prompt, extra, tools)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of all tokens. Raises `RequestError` without a tokenizer."""
        if self._tokenizer is None:
            raise RequestError(NO_IDS_OF_TEXT, param="tokens")
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool, shown: Collection[str] = ()) -> Detokenizer:
        """Return a new detokenizer for one choice's answer to `prompt`. `shown`: the names of special tokens that have
        text even where others are skipped."""
        if self._tokenizer is None:
            return NoText()
        kept = {self._special_names[name] for name in shown if name in self._special_names} if skip_special else ()
        if self._byte_level:
            if kept:
                return ByteDetokenizer(lambda token: self._bytes[token] if token in kept else self._shown[token])
            return ByteDetokenizer((self._shown if skip_special else self._bytes).__getitem__)
        skipped = self._special.difference(kept) if skip_special else frozenset[int]()
        if len(self._fallback) == 256:
            return FallbackDetokenizer(self.decode, prompt, skipped, self._fallback)
        return WindowDetokenizer(self.decode, prompt, skipped)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; of a special token its name. Empty for an unknown token."""
        return self._bytes[token]

    def token_piece(self, token: int) -> str:
        """Return the vocabulary's own string for a token, empty for an unknown token or without a tokenizer."""
        piece = self._tokenizer.id_to_token(token) if self._tokenizer is not None else None
        return piece if piece is not None else ""

    def _read_bytes(self, token: int) -> bytes:
        piece = self.token_piece(token)
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[c] for c in piece)
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def read_model_tokenizer(model: Path, max_chars: int) -> ModelTokenizer:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a checkpoint: its folder or GGUF file.

    `max_chars` bounds a rendered chat prompt. Raises `CheckpointError` for a file that is there and can't be read. A
    missing tokenizer is no error.
    """
    files = read_tokenizer_files(model)
    template = read_chat_template(model, files, max_chars)
    if files.content is None:
        return ModelTokenizer(None, template, {})
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(files.content)
    except Exception as error:  # The library raises bare `Exception`.
        text = " ".join(str(error).split())
        raise CheckpointError(f"{model / TOKENIZER} is not a tokenizer: {text}") from None
    return ModelTokenizer(tokenizer, template, files.tree)


def _any_of(names: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern of any of the names, of those that begin at one place the longest; None without any. It looks at each
    character of a text once for each letter that they share, however many they are."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        further = "|".join(re.escape(letter) + written(below) for letter, below in node.items() if letter)
        if not further:
            return ""
        return f"(?:{further})?" if "" in node else f"(?:{further})" if len(node) > 1 else further

    return re.compile(written(tree)) if names else None


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _falls_back(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteFallback" or any(map(_falls_back, decoder.get("decoders") or ()))


def _keeps_all_text(tree: Mapping[str, Any]) -> bool:
    """Whether each character of a text is in some token: none is dropped, stripped, or fused into an unknown token."""
    model, normalizer = tree.get("model") or {}, tree.get("normalizer") or {}
    parts = [tree.get("pre_tokenizer") or {}]
    parts = [p for part in parts for p in part.get("pretokenizers", [part])]
    return (
        model.get("type") == "BPE"
        and (model.get("unk_token") is None or bool(model.get("byte_fallback")) or not model.get("fuse_unk"))
        and normalizer.get("type") in (None, "NFC")
        and all(
            p.get("type") in (None, "ByteLevel", "Digits") or (p.get("type") == "Split" and p["behavior"] != "Removed")
            for p in parts
        )
        and not any(t.get("lstrip") or t.get("rstrip") for t in tree.get("added_tokens", ()))
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable Latin-1 stands for itself, the rest is from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()
