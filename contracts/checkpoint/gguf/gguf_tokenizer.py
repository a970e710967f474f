"""A GGUF file's tokenizer as the content of `tokenizer.json` and `tokenizer_config.json`.

The file has a vocabulary with kinds and either merges (byte-level BPE, ``gpt2``) or scores (SentencePiece, ``llama``),
and names what splits a text before; it has no normalizer, pre-tokenizer or decoder. Those are written here as the
published tokenizers of these names have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.contracts.checkpoint.gguf.gguf_header import GgufHeader

_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS = {**_LEVEL, "use_regex": True}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_MARKS}|{_REST}"
_GPT4O = rf"{_CASES[0]}{_ENDINGS}?|{_CASES[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_MARKS}|{_REST}"


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """How one family splits a text."""

    pattern: str = ""
    """The regular expression of a word; empty: GPT-2's."""
    digits: bool = False
    """Each digit is a word."""
    composed: bool = False
    """Characters are composed first (NFC)."""
    whole_words: bool = False
    """A word that is a token is taken as it is, whatever the merges would make of it."""
    begins: bool = False
    """A text begins with the first token unless the file says otherwise."""

    def tree(self) -> dict[str, object]:
        """The pre-tokenizer as `tokenizer.json` has it."""
        if self.digits:
            return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _WORDS]}
        if not self.pattern:
            return dict(_WORDS)
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, {**_LEVEL, "use_regex": False}]}


_LLAMA3_FAMILY = Pretokenizer(_LLAMA3, whole_words=True, begins=True)
_QWEN2_FAMILY = Pretokenizer(_QWEN2, composed=True)
KINDS: Mapping[str, Pretokenizer] = {
    "gpt-2": Pretokenizer(),
    "mpt": Pretokenizer(),
    "smollm": Pretokenizer(digits=True),
    "command-r": Pretokenizer(digits=True),
    "starcoder": Pretokenizer(digits=True),
    "refact": Pretokenizer(digits=True),
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "smaug-bpe": Pretokenizer(_LLAMA3),
    "dbrx": Pretokenizer(_LLAMA3),
    "qwen2": _QWEN2_FAMILY,
    "qwen35": Pretokenizer(_QWEN35, composed=True),
    "deepseek-r1-qwen": Pretokenizer(_QWEN2),
    "tekken": Pretokenizer(_TEKKEN, whole_words=True, begins=True),
    "llama4": Pretokenizer(_GPT4O),
    "gpt-4o": Pretokenizer(_GPT4O),
}
"""The families of published tokenizers, by the name that a file gives what splits its text (``tokenizer.ggml.pre``);
each as the `tokenizer.json` of these has it."""


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges in the order of the scores of what they make, the highest first."""
    numbers = {token: number for number, token in enumerate(tokens)}
    rated = [
        (scores[number], len(left), len(right), left, right)
        for token, number in numbers.items()
        for left, right in _splits(token, numbers)
    ]
    rated.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in rated]


def merges_by_order(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The merges in the order of the vocabulary of what they make: Gemma's scores are not in the order of its merges,
    its tokens are."""
    numbers = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        merges += sorted(_splits(token, numbers), key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return merges


def _splits(token: str, numbers: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The ways in which two tokens make `token`, in the order of the vocabulary."""
    ways = [
        (left, right)
        for at in range(1, len(token))
        if (left := token[:at]) in numbers and (right := token[at:]) in numbers
    ]
    return iter(sorted(ways, key=lambda pair: (numbers[pair[0]], numbers[pair[1]])))


_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens: the unknown one, special ones, and others that are found whole before a text is split."""
_SPACE = "\u2581"
_CONFIG_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_MODELS = ("gpt2", "llama")
_TEMPLATE = "tokenizer.chat_template"


class GgufTokenizer:
    """The tokenizer of one file. Raises `CheckpointError` for one that is missing, malformed, or of a kind that isn't
    supported: text that is split otherwise than in training makes poor answers that nobody can tell apart."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._model = header.metadata.get("tokenizer.ggml.model")
        if self._model not in _MODELS:
            raise header.refuse(f"tokenizer {self._model!r} is not supported; supported are {', '.join(_MODELS)}")
        self._tokens: list[str] = self._list("tokens", str)
        self._kinds: list[int] = self._list("token_type", int) if self._has("token_type") else [1] * len(self._tokens)
        if len(self._kinds) != len(self._tokens):
            raise header.refuse(f"it has {len(self._tokens)} tokens and kinds of {len(self._kinds)}")
        self._pre = self._pretokenizer() if self._model == "gpt2" else Pretokenizer()

    def tokenizer_json(self) -> str:
        """The content of `tokenizer.json`."""
        tree = self._byte_level() if self._model == "gpt2" else self._sentencepiece()
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": self._added(),
                "post_processor": self._post_processor(),
                **tree,
            },
            ensure_ascii=False,
        )

    def config_json(self) -> str:
        """The content of `tokenizer_config.json`, with the chat templates."""
        # Others would go by the model's type, and build a tokenizer of their own that may split text otherwise.
        values: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, key in _CONFIG_TOKENS.items():
            if (token := self._token(key)) is not None:
                values[name] = token
        metadata = self._header.metadata
        default, tools = metadata.get(_TEMPLATE), metadata.get(f"{_TEMPLATE}.tool_use")
        if isinstance(default, str):
            templates = [{"name": "default", "template": default}]
            if isinstance(tools, str):
                templates.append({"name": "tool_use", "template": tools})
            values["chat_template"] = templates if len(templates) > 1 else default
        return json.dumps(values, ensure_ascii=False)

    # ------------------------------------------------------------ the metadata

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._header.metadata

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self._header.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not found or not isinstance(found[0], kind):
            raise self._header.refuse(f"it has no list tokenizer.ggml.{key}")
        return found

    def _flag(self, key: str, default: bool) -> bool:
        return bool(self._header.metadata.get(f"tokenizer.ggml.{key}", default))

    def _token(self, key: str) -> str | None:
        number = self._header.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(number, int):
            return None
        if not 0 <= number < len(self._tokens):
            raise self._header.refuse(f"tokenizer.ggml.{key} is {number}, and it has {len(self._tokens)} tokens")
        return self._tokens[number]

    def _pretokenizer(self) -> Pretokenizer:
        name = self._header.metadata.get("tokenizer.ggml.pre")
        if name not in KINDS:
            raise self._header.refuse(
                f"pre-tokenizer {name!r} is not supported; supported are {', '.join(sorted(KINDS))} (files that name "
                "none, or 'default', are of old conversions: make or fetch the file anew)"
            )
        return KINDS[str(name)]

    # ------------------------------------------------------------ parts of tokenizer.json

    def _added(self) -> list[dict[str, object]]:
        """The tokens that are found whole in a text; in a SentencePiece vocabulary its unknown token, too."""
        special = (_CONTROL, _UNKNOWN) if self._model == "llama" else (_CONTROL,)
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": self._spelt(token), **plain, "special": kind in special}
            for number, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in special or kind == _USER_DEFINED
        ]

    def _post_processor(self) -> dict[str, object] | None:
        """What puts the first and last token around a text, where the file says so."""
        first = self._token("bos_token_id") if self._flag("add_bos_token", self._bos_by_default) else None
        last = self._token("eos_token_id") if self._flag("add_eos_token", False) else None
        specials = [token for token in (first, last) if token is not None]
        if not specials:
            return None
        text: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
        around = [{"SpecialToken": {"id": token, "type_id": 0}} for token in specials]
        single = [*around[: first is not None], text, *around[first is not None :]]
        table = {token: {"id": token, "ids": [self._tokens.index(token)], "tokens": [token]} for token in specials}
        pair = [*single, *single[:1], {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": table}

    @property
    def _bos_by_default(self) -> bool:
        return self._model == "llama" or self._pre.begins

    def _byte_level(self) -> dict[str, object]:
        merges = self._merges()
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            "normalizer": {"type": "NFC"} if self._pre.composed else None,
            "pre_tokenizer": self._pre.tree(),
            "decoder": {**level, "use_regex": True},
            "model": _bpe(self._tokens, merges, ignore_merges=self._pre.whole_words),
        }

    def _sentencepiece(self) -> dict[str, object]:
        tokens = [self._spelt(token) for token in self._tokens]
        gemma = str(self._header.metadata.get("general.architecture")).startswith("gemma")
        if self._has("merges"):
            merges: Sequence[tuple[str, str]] = self._merges()
        elif gemma:
            merges = merges_by_order(tokens)
        else:
            scores = self._list("scores", float)
            if len(scores) != len(tokens):
                raise self._header.refuse(f"it has {len(tokens)} tokens and scores of {len(scores)}")
            merges = merges_by_score(tokens, scores)
        prefixed = self._flag("add_space_prefix", not gemma)
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepended = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
        parts: list[dict[str, object]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixed:
            parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = next((t for t, kind in zip(tokens, self._kinds, strict=True) if kind == _UNKNOWN), None)
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": parts},
            "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        }

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for merge in self._list("merges", str):
            if (at := merge.find(" ", 1)) < 1:
                raise self._header.refuse(f"tokenizer.ggml.merges has {merge!r}, which is no two tokens")
            merges.append((merge[:at], merge[at + 1 :]))
        return merges

    def _spelt(self, token: str) -> str:
        """A token as a normalised text has it: runs of spaces, which files have as such, are marks."""
        return _SPACE * len(token) if self._model == "llama" and token.isspace() and " " in token else token


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: object) -> Mapping[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }
