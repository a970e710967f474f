"""What splits a text before byte-level merges, by the names that GGUF files give it (``tokenizer.ggml.pre``).

A name stands for a family of published tokenizers; what is written here is what the `tokenizer.json` of these has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
"""The families by name."""
