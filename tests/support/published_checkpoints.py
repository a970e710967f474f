"""Folders and files of checkpoints in the forms in which people publish them: what a router reads, without a model.

`PublishedForm` names a form by its tokenizer, by where its marks are, by its chat template and by where its ends are;
`write_published` writes one. The tokenizers are trained on this project's prose and code, so that tokens are of several
characters, and others are parts of one.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.router.text.published_templates import TEMPLATES
from tests.support.gguf_files import CONTROL, NORMAL, write_gguf
from tests.support.served_cluster import ROOT
from twinpool.router.parsers.tool_formats import FORMATS

SPACE = "\u2581"
UNKNOWN, USER_DEFINED, BYTE = 2, 4, 6
"""Kinds of tokens of a GGUF file, beside those of `tests.support.gguf_files`."""
ENDS = {
    "hermes": "<|im_end|>", "qwen3_coder": "<|im_end|>", "nemotron_json": "<|im_end|>", "kimi_k2": "<|im_end|>",
    "glm45": "<|user|>", "glm47": "<|user|>", "llama3_json": "<|eot_id|>", "minimax_m2": "[e~[",
    "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_v31": "<｜end▁of▁sentence｜>",
    "deepseek_v32": "<｜end▁of▁sentence｜>", "deepseek_v4": "<｜end▁of▁sentence｜>",
    "apriel": "<|end|>", "granite": "<|end_of_text|>", "seed_oss": "<seed:eos>",
    "mistral": "</s>", "mistral_json": "</s>", "gemma4": "<turn|>", "harmony": "<|return|>",
}  # fmt: skip
"""By format of calls, the token that ends an answer."""
FURTHER_END = "<|further_end|>"
THOUGHTS = ("<think>", "</think>")
PUBLISHED_TURNS = (
    "<|im_start|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>", "<|start_header_id|>",
    "<|end_header_id|>", "<｜User｜>", "<｜Assistant｜>", "]~b]", "[INST]", "[/INST]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<|turn>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>",
    "<|start_of_role|>", "<|end_of_role|>", "<seed:bos>",
)  # fmt: skip
"""Tokens of turns; a form has those that its template names."""
SHOWN_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
THINKING = (
    SHOWN_TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    '{% for c in m.tool_calls %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As templates whose models think always: the prompt opens the thought."""
OTHER_TEMPLATES: dict[str, str | None] = {"none": None, "plain": PLAIN, "parts": PARTS, "thinking": THINKING}

TOKENIZER_KINDS = (
    "byte level", "tekken", "metaspace", "prepended", "without prefix", "gguf byte level", "gguf sentencepiece",
)  # fmt: skip
MARK_KINDS = ("special", "not special", "added_tokens_decoder", "added_tokens.json", "special_tokens_map.json", "none")
"""Where the marks of calls and of thoughts are: in `tokenizer.json`, special or not; in another file; no tokens."""
TEMPLATE_KINDS = (*OTHER_TEMPLATES, *TEMPLATES)
END_KINDS = ("generation config", "config", "tokenizer", "several", "beyond the vocabulary")


@dataclass(frozen=True)
class PublishedForm:
    tokenizer: str
    marks: str
    template: str
    ends: str

    def __str__(self) -> str:
        return " / ".join((self.tokenizer, self.marks, self.template, self.ends))

    @property
    def calls(self) -> str:
        """The format of the model's calls; of a template that shows no tools, the one that the router teaches."""
        return self.template if self.template in TEMPLATES else "hermes"

    @property
    def thinks(self) -> bool:
        """Whether a prompt opens the model's thought."""
        return self.template in ("thinking", "minimax_m2")

    @property
    def source(self) -> str | None:
        """The chat template, None for a base model's."""
        if self.template in OTHER_TEMPLATES:
            return OTHER_TEMPLATES[self.template]
        return SHOWN_TOOLS + TEMPLATES[self.template]

    @property
    def end(self) -> str:
        return "</s>" if self.template in ("none", "plain") else ENDS[self.calls]

    @property
    def mark_names(self) -> tuple[str, ...]:
        """The texts by which the model marks calls and thoughts."""
        named = tuple(mark for mark in FORMATS[self.calls].marks if not mark.startswith(" "))
        return tuple(dict.fromkeys((*named, *THOUGHTS)))


@functools.cache
def _trained(kind: str) -> dict[str, Any]:
    """A vocabulary and merges of byte-level tokens, or of pieces with blanks as U+2581."""
    texts = [(ROOT / "bench" / "demo_model" / "heldout.txt").read_text()[:20_000], (ROOT / "docs/using.md").read_text()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "pieces" else _byte_level(kind)
    alphabet = [] if kind == "pieces" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, limit_alphabet=256, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


def _byte_level(kind: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[kind]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def bare_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer with `<s>` and `</s>`, which are special, and `<unk>`, without the tokens of a template."""
    special = ["<unk>", "<s>", "</s>"]
    if kind in ("byte level", "tekken"):
        split = "qwen2" if kind == "byte level" else kind
        learned = _trained(split)
        pieces = sorted(learned["vocab"], key=lambda piece: int(learned["vocab"][piece]))
        # Tekken's special tokens come first, the others' last.
        names = [*special, *pieces] if kind == "tekken" else [*pieces, *special]
        merges = [tuple(pair) for pair in learned["merges"]]
        found = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
        found.pre_tokenizer, found.decoder = _byte_level(split), decoders.ByteLevel()
    else:
        learned = _trained("pieces")
        pieces = sorted(learned["vocab"], key=lambda piece: int(learned["vocab"][piece]))
        names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        merges = [tuple(pair) for pair in learned["merges"]]
        vocab = {name: number for number, name in enumerate(names)}
        found = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        after: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "metaspace":
            found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        elif kind == "prepended":
            found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        else:
            found.normalizer = normalizers.Replace(" ", SPACE)
        found.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if kind != "without prefix" else after)
        first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", names.index("<s>"))])
        found.post_processor = first
    found.add_special_tokens(special)
    return found


def tokenizer_of(form: PublishedForm) -> Tokenizer:
    """The tokenizer of a form's GGUF file, made without the file."""
    found = bare_tokenizer("tekken" if form.tokenizer == "gguf byte level" else "prepended")
    turns, marks = _names(form)
    found.add_special_tokens(turns)
    found.add_tokens([AddedToken(name, normalized=False, special=form.marks == "special") for name in marks])
    return found


def _names(form: PublishedForm) -> tuple[list[str], list[str]]:
    """The tokens of turns, and those of marks, in the order of their ids."""
    turns = [name for name in PUBLISHED_TURNS if name in (form.source or "")]
    turns += [name for name in (form.end,) if name != "</s>" and name not in turns]
    turns += [FURTHER_END] if form.ends == "several" else []
    return turns, [] if form.marks == "none" else [name for name in form.mark_names if name not in turns]


def write_published(form: PublishedForm, folder: Path) -> Path:
    """Write a checkpoint of this form, for a router; returns its path, the folder or a GGUF file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    turns, marks = _names(form)
    if form.tokenizer.startswith("gguf"):
        return _write_file(form, folder, turns, marks)
    tokenizer = bare_tokenizer(form.tokenizer)
    tokenizer.add_special_tokens(turns)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": form.end}
    if form.source is not None:
        config["chat_template"] = form.source
    begin = tokenizer.get_vocab_size()
    if form.marks == "special":
        tokenizer.add_special_tokens(marks)
    elif form.marks in ("not special", "special_tokens_map.json"):
        tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in marks])
    elif form.marks == "added_tokens_decoder":
        told = tokenizer.get_added_tokens_decoder()
        for number, name in enumerate(marks, begin):
            told[number] = AddedToken(name, normalized=False, special=False)
        config["added_tokens_decoder"] = {
            str(number): {"content": token.content, "special": token.special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number, token in told.items()
        }
    vocab = tokenizer.get_vocab_size() + (len(marks) if form.marks.startswith("added") else 0)
    end = tokenizer.token_to_id(form.end)
    ends: dict[str, Any] = {
        "generation config": end,
        "several": [tokenizer.token_to_id(FURTHER_END), end],
        "beyond the vocabulary": [end, vocab + 99],
    }
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": 64,
             "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
             "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
             "torch_dtype": "float32"}  # fmt: skip
    if form.ends == "config":
        model["eos_token_id"] = end
    files = {"config.json": model, "tokenizer_config.json": config}
    if form.ends in ends:
        files["generation_config.json"] = {"eos_token_id": ends[form.ends]}
    if form.marks == "added_tokens.json":
        files["added_tokens.json"] = {name: number for number, name in enumerate(marks, begin)}
    if form.marks == "special_tokens_map.json":
        files["special_tokens_map.json"] = {"additional_special_tokens": [*turns, *marks]}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"model.embed_tokens.weight": torch.zeros(1, 64)}, folder / "model.safetensors")
    return folder


def _write_file(form: PublishedForm, folder: Path, turns: list[str], marks: list[str]) -> Path:
    """Write a GGUF file, whose marks are special (control) or not (user defined)."""
    of_bytes = form.tokenizer == "gguf byte level"
    tree = json.loads(bare_tokenizer("tekken" if of_bytes else "prepended").to_str())["model"]
    kind = CONTROL if form.marks == "special" else USER_DEFINED
    names = [*sorted(tree["vocab"], key=lambda name: int(tree["vocab"][name])), *turns, *marks]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(names) - 3 - len(turns) - len(marks))
    kinds += [CONTROL] * len(turns) + [kind] * len(marks)
    if not of_bytes:
        kinds[3 : 3 + 256] = [BYTE] * 256

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2" if of_bytes else "llama")
        writer.add_tokenizer_pre("tekken" if of_bytes else "default")
        writer.add_token_list(names)
        writer.add_token_types(kinds)
        if of_bytes:
            writer.add_token_merges([" ".join(pair) for pair in tree["merges"]])
        else:
            # Pieces that are merged earlier are rated higher.
            writer.add_token_scores([0.0 if number < 259 else -float(number) for number in range(len(names))])
            writer.add_unk_token_id(0)
            writer.add_add_space_prefix(True)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(names.index(form.end))
        writer.add_add_bos_token(not of_bytes)
        if form.source is not None:
            writer.add_chat_template(form.source)

    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({
        "num_attention_heads": 1, "hidden_size": 64, "max_position_embeddings": 4096, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-5,
        "vocab_size": len(names),
    }))  # fmt: skip
    save_file({"model.embed_tokens.weight": torch.zeros(len(names), 64)}, bare / "model.safetensors")
    return write_gguf(bare, folder / "published.gguf", "llama", tokenizer=write)
