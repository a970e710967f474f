"""Checkpoints with random weights, and the oracle that says what they answer.

The weights are large (`initializer_range` 0.3) and norms are spread, so that the output hangs on every byte of state;
with the usual small ones a random model repeats one token whatever it has read.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.sampling.sampler import uniform

VOCAB = 300
CONTEXT = 4096
EOS = 0
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_checkpoint(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    rope: str = "default",
    dtype: str = "float32",
    shards: int = 1,
    old_spelling: bool = False,
    head_dim: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 64,
    layers: int = 2,
    bias: bool = False,
    vocab: int = VOCAB,
    context: int = CONTEXT,
    chat: bool = True,
    eos: int | None = EOS,
    seed: int = 0,
) -> Path:
    """Write a Hugging Face checkpoint folder with random weights and a small byte-level tokenizer; returns `folder`.

    `kind` is ``llama`` or ``qwen3``; `shards` > 1 writes several safetensors files and an index; `old_spelling`
    rewrites `config.json` with `rope_theta`, `rope_scaling` and `torch_dtype` as published folders have them.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]},
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    config: PretrainedConfig = (
        LlamaConfig(**common, mlp_bias=bias) if kind == "llama" else Qwen3Config(**common, use_sliding_window=False)
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.3)
    torch.random.set_rng_state(state)
    model = model.to(getattr(torch, dtype))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=f"{size // shards // 1000 + 1}KB" if shards > 1 else "5GB")
    generation = {} if eos is None else {"eos_token_id": eos}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if old_spelling:
        _respell(folder / "config.json")
    write_tokenizer(folder, vocab, chat)
    return folder


def copy_checkpoint(folder: Path, to: Path, **config: object) -> Path:
    """A copy with some keys of `config.json` changed; a value of None removes the key."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return to


def _respell(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def write_tokenizer(folder: Path, vocab: int, chat: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then there was light"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Verdict:
    """How an answer compares with the oracle's. `equal` by the rule; `margin` where it was needed, else None."""

    equal: bool
    exact: bool
    position: int | None = None
    """Index of the first differing token of the answer."""
    margin: float | None = None
    """The oracle's two best logits there, their difference."""
    allowed: float | None = None


class Oracle:
    """transformers on a checkpoint folder, in its own dtype unless another is given."""

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        # torch's grouped products know no float64.
        experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts).eval()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens after `prompt`; end tokens don't end it."""
        tokens = torch.tensor([list(prompt)])
        out = self.model(tokens, use_cache=True)
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(out.logits[0, -1].float().argmax()))
            if len(answer) < count:
                out = self.model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        return answer

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Teacher-forced logits, [len(tokens), vocab] float32, in one shot."""
        return self._chunked(torch.tensor([list(tokens)]), [len(tokens)])[0]

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The hidden states behind the final norm, [len(tokens), hidden] float32."""
        out = self.model.base_model(torch.tensor([list(tokens)]))
        hidden: Tensor = out.last_hidden_state[0].float()
        return hidden

    def chunked_logits(self, tokens: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """The same with the cache, in chunks of `cuts` tokens, which add up to all of them."""
        return self._chunked(torch.tensor([list(tokens)]), cuts)[0]

    @torch.inference_mode()
    def _chunked(self, tokens_bt: Tensor, cuts: Sequence[int]) -> Tensor:
        assert sum(cuts) == tokens_bt.shape[1]
        cache, parts = None, []
        for part_bt in torch.split(tokens_bt, list(cuts), dim=1):
            out = self.model(part_bt, past_key_values=cache, use_cache=len(cuts) > 1)
            cache = out.past_key_values
            parts.append(out.logits.float())
        return torch.cat(parts, 1)

    @cached_property
    def difference(self) -> float:
        """The largest difference of a logit between the oracle's own one-shot and chunked runs on this checkpoint; in
        bfloat16 at least the step from the largest logit to the next number: on some processors all its runs round
        alike, and another order of additions may round otherwise all the same."""
        generator = torch.Generator().manual_seed(1)
        worst = 0.0
        for batch, cuts in _MANY_CUTS if self.model.dtype == torch.bfloat16 else _CUTS:
            length = sum(cuts)
            tokens_bt = torch.randint(self.model.config.vocab_size, (batch, length), generator=generator)
            whole = self._chunked(tokens_bt, [length])
            worst = max(worst, float((whole - self._chunked(tokens_bt, cuts)).abs().max()))
            if self.model.dtype == torch.bfloat16:
                largest = math.frexp(float(whole.abs().max()))[1] - 1
                worst = max(worst, math.ldexp(torch.finfo(torch.bfloat16).eps, largest))
        return worst

    @torch.inference_mode()
    def surely_says(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether `answer` is what `generate` gives, by one pass over all of it instead of one for each token: every
        token is the best after those before it, by more than the oracle's own difference can move two logits."""
        logits = self.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        best, at = logits.topk(2)
        sure = (best[:, 0] - best[:, 1]) > 2 * self.difference
        return bool((at[:, 0] == torch.tensor(list(answer))).all() and sure.all())


_CUTS = ((1, (16, *[1] * 24, 33)), (8, (64, *[7] * 8, *[1] * 24, 100, 56)), (1, (100, 100, 200, *[1] * 24, 176)))
"""Sequences and their chunks in which the oracle is measured against itself: large, small and of one token, early and
late. Several sequences at once give as many figures as several times the passes."""
_MANY_CUTS = tuple(
    (1, (chunk,) * (length // chunk) + ((length % chunk,) if length % chunk else ()))
    for length, chunk in ((97, 1), (300, 64), (300, 7), (600, 1), (600, 100))
)
"""Of bfloat16: its largest differences are rare (one last bit, another expert), and take many single tokens to meet."""


def compare(oracle: Oracle, prompt: Sequence[int], got: Sequence[int]) -> Verdict:
    """Judge a greedy answer by the rule: the oracle's tokens, or a first difference within twice its own noise."""
    if oracle.surely_says(prompt, got):
        return Verdict(equal=True, exact=True)
    want = oracle.generate(prompt, len(got))
    first = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
    if first is None:
        return Verdict(equal=True, exact=True)
    logits = oracle.logits([*prompt, *want[:first]])[-1]
    best = logits.topk(2).values
    margin, allowed = float(best[0] - best[1]), 2 * oracle.difference
    within = margin <= allowed and bool(logits[got[first]] >= best[1])
    return Verdict(equal=within, exact=False, position=first, margin=margin, allowed=allowed)


def compare_forced(oracle: Oracle, tokens: Sequence[int], got: Sequence[int], first: int = 0) -> Verdict:
    """Judge bf16 argmaxes by the rule: teacher-forced on `tokens`, `got[i]` being the choice after `tokens[: i + 1]`.

    From index `first` on, every choice must be the oracle's, or one whose logit is closer to the best than twice the
    oracle's own difference, as in `compare`: two logits that may each move by that much may change places.
    """
    logits = oracle.logits(tokens)
    best = logits.max(-1).values
    gaps = best - logits.gather(1, torch.tensor(list(got)).unsqueeze(1)).squeeze(1)
    gaps[:first] = 0
    worst = int(gaps.argmax())
    gap, exact = float(gaps[worst]), bool((gaps == 0).all())
    allowed = 2 * oracle.difference
    return Verdict(gap <= allowed, exact, None if exact else worst, gap, allowed)


def compare_sampled(oracle: Oracle, prompt: Sequence[int], got: Sequence[int], params: SamplingParams) -> Verdict:
    """Judge a sampled answer (temperature and top-k only) by the rule: every token is the one that the oracle's
    distribution, given the same tokens before it, has at the draw, or one whose share begins or ends closer to the
    draw than the oracle's own difference moves it.
    """
    logits = oracle.logits([*prompt, *got[:-1]])[len(prompt) - 1 :].double() / params.temperature
    noise = 2 * oracle.difference / params.temperature
    allowed = math.expm1(noise)
    worst: tuple[float, int | None] = (0.0, None)
    for i, (row, token) in enumerate(zip(logits, got, strict=True)):
        draw = uniform(params.seed, params.choice, len(prompt) + i)
        outside = min(_outside(row, token, draw, count) for count in _cuts(row, params.top_k, noise))
        worst = max(worst, (outside, i), key=lambda pair: pair[0])
    margin, position = worst
    if not margin:
        return Verdict(equal=True, exact=True)
    return Verdict(equal=margin <= allowed, exact=False, position=position, margin=margin, allowed=allowed)


def _cuts(row_v: Tensor, top_k: int, noise: float) -> list[int]:
    """How many tokens top-k keeps: `top_k`, and what it might keep where logits tie at the cut."""
    if not top_k:
        return [len(row_v)]
    floor = row_v.topk(top_k).values[-1]
    sure, possible = int((row_v > floor + noise).sum()) + 1, int((row_v >= floor - noise).sum())
    return [top_k, *range(sure, possible + 1)]


def _outside(row_v: Tensor, token: int, draw: float, kept: int) -> float:
    """How far `draw` lies outside the share of `token` in the distribution over the `kept` best tokens; 0 inside."""
    floor = row_v.topk(kept).values[-1]
    share = row_v.masked_fill(row_v < floor, -torch.inf).softmax(-1)
    end = float(share[: token + 1].sum())
    return max(end - float(share[token]) - draw, draw - end, 0.0)
