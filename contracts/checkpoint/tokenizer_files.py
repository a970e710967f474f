"""A checkpoint's tokenizer, of all files that say something of it.

`tokenizer.json` has the whole tokenizer in most checkpoints. In others the added tokens, or which of them are special,
are in `tokenizer_config.json` (`added_tokens_decoder`, `eos_token` and so on), `special_tokens_map.json` or
`added_tokens.json`; transformers puts them together, and so does this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf, read_gguf
from twinpool.contracts.checkpoint.gguf.gguf_tokenizer import GgufTokenizer
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.outside_data import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def read_checkpoint_text(model: Path, name: str) -> str | None:
    """The content of a checkpoint's text file, None where there is none; `model` is its folder or GGUF file.

    A GGUF file has `tokenizer.json` and `tokenizer_config.json`. Raises `CheckpointError` for one that can't be read.
    """
    if is_gguf(model):
        if name not in (TOKENIZER, TOKENIZER_CONFIG):
            return None
        tokenizer = GgufTokenizer(read_gguf(model))
        return tokenizer.tokenizer_json() if name == TOKENIZER else tokenizer.config_json()
    path = model / name
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a checkpoint's files say of its tokenizer."""

    content: str | None
    """`tokenizer.json`, with what other files say of added tokens; None without one."""
    tree: Mapping[str, Any]
    """`content`, read; empty without one."""
    config: Mapping[str, Any]
    """The keys of `tokenizer_config.json`, with those of `special_tokens_map.json` over them."""

    @property
    def named(self) -> dict[str, str]:
        """Special tokens by the names under which templates have them: ``bos_token`` and others."""
        extra = self.config.get("extra_special_tokens")
        given = {name: self.config.get(name) for name in _NAMES} | (extra if isinstance(extra, dict) else {})
        return {name: text for name, value in given.items() if (text := _text(value))}


def read_tokenizer_files(model: Path) -> TokenizerFiles:
    """Read the tokenizer of a checkpoint, its folder or GGUF file. Raises `CheckpointError` for a file that is there
    and can't be read."""
    config = _config(model)
    content = read_checkpoint_text(model, TOKENIZER)
    if content is None:
        return TokenizerFiles(None, {}, config)
    tree = _tree(model, TOKENIZER)
    added = [dict(token) for token in tree.get("added_tokens") or () if isinstance(token, dict)]
    known = {token.get("content"): token for token in added}
    for number, token in _told_elsewhere(model, config):
        there = known.get(token["content"])
        if there is not None:
            there.update({name: value for name, value in token.items() if name in _FLAGS})
        else:
            known[token["content"]] = {"id": number, **_FLAGS, **token}
    ids = _ids(tree)
    for name in filter(None, (_text(config.get(each)) for each in _NAMES)):  # Special whatever they are elsewhere.
        if name in known:
            known[name]["special"] = True
        elif name in ids:
            known[name] = {"id": ids[name], "content": name, **_FLAGS, "special": True}
    merged = sorted(known.values(), key=lambda token: token.get("id", 0))
    if merged != (tree.get("added_tokens") or []):
        tree = {**tree, "added_tokens": merged}
        content = json.dumps(tree, ensure_ascii=False)
    return TokenizerFiles(content, tree, config)


def end_of_tokenizer(model: Path) -> int | None:
    """The id of a folder's `eos_token`; None without one. The vocabulary, which takes a second to read, is looked
    through only where the token is among no added ones. Of a GGUF file it is among the ends of its header. Raises as
    `read_tokenizer_files` does."""
    if is_gguf(model):
        return None
    config = _config(model)
    if not (name := _text(config.get("eos_token"))):
        return None
    text = read_checkpoint_text(model, TOKENIZER) or ""
    ids: dict[Any, Any] = {token["content"]: number for number, token in _told_elsewhere(model, config)}
    for token in _added_tokens(text):
        ids[token.get("content")] = token.get("id")
    found = ids.get(name) if name in ids or not text else _ids(_tree(model, TOKENIZER)).get(name)
    return found if isinstance(found, int) else None


def _config(model: Path) -> dict[str, Any]:
    return _tree(model, TOKENIZER_CONFIG) | _tree(model, "special_tokens_map.json")


def _added_tokens(text: str) -> list[dict[str, Any]]:
    """The added tokens of the text of a `tokenizer.json`; the rest of it isn't read."""
    found = _ADDED_TOKENS.search(text)
    if found is None:
        return []
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, found.end())
    except (ValueError, RecursionError):
        return []
    return [token for token in tokens if isinstance(token, dict)] if isinstance(tokens, list) else []


_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')


def _told_elsewhere(model: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the added tokens of other files than `tokenizer.json`, each with its id."""
    for name, number in _tree(model, "added_tokens.json").items():
        if isinstance(number, int):
            yield number, {"content": name}
    decoder = config.get("added_tokens_decoder")
    for number, token in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and str(number).isdecimal():
            flags = {name: value for name, value in token.items() if name in _FLAGS and isinstance(value, bool)}
            yield int(number), {"content": token["content"], **flags}


def _text(value: object) -> str:
    """The text of a special token, which is given alone or with its flags; empty for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _ids(tree: Mapping[str, Any]) -> Mapping[str, int]:
    model = tree.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return vocab
    pieces = vocab if isinstance(vocab, list) else []
    return {piece[0]: number for number, piece in enumerate(pieces) if isinstance(piece, list) and piece}


def _tree(model: Path, name: str) -> dict[str, Any]:
    """A file that is one JSON object; empty where it isn't there."""
    content = read_checkpoint_text(model, name)
    if content is None:
        return {}
    try:
        tree = read_json(content)
    except ValueError as error:
        raise CheckpointError(f"can't read {model / name}: {error}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{model / name} must hold a JSON object")
    return tree
