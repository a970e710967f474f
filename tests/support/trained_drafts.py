"""What drafts, trained from a seed and the files of this tree: an EAGLE-3 head for the demo, and a small hybrid of
attention and recurrence with its layer for multi-token prediction.

    python -m tests.support.trained_drafts build/drafts  # a quarter of an hour for both, or less
    twinpool serve --model demo --set engine.draft_model=build/drafts/eagle3
    twinpool serve --model build/drafts/hybrid --set engine.draft_model=mtp

The hybrid is the demo with three recurrent layers before each of its own, which learn prose that the demo hasn't seen.
What drafts learns its own model's distributions of the next token, on texts that the demo goes on with from prose, and
in the end is unrolled as it is used: each further draft reads the layer's own output before it (EAGLE-3, arXiv
2503.01840).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from bench.common.random_model import DEMO
from bench.demo_model.demo_checkpoint import CONTEXT, VOCABULARY
from bench.demo_model.demo_checkpoint import LAYERS as DEMO_LAYERS
from bench.demo_model.made_up_names import FILLER

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 192, 4, 2, 48, 512
"""Of the demo."""
EVERY = 4
"""One layer in so many of the hybrid has attention."""
THETA, EPS = 10_000.0, 1e-6
TAPS = (1, 2, 3)
"""Of the demo's four layers, those whose inputs an EAGLE-3 head reads."""
DEPTH = 3
"""Drafts that a head learns, one behind the other."""
PROMPT, TEXT, AT_ONCE = 24, 160, 128
"""Tokens of a prompt, and of a prompt with what a model says behind it; texts that are made together."""
TRAINED_ON = 0.8
"""The part of the held-out prose that prompts are from; a bench may ask with the rest."""
RATE = 3e-3
CHUNK = 32


class Trained(NamedTuple):
    """Folders below that of all: of what is trained, and of the model, where that is one of them."""

    trained: str
    draft_model: str
    model: str | None = None

    def below(self, folder: Path) -> tuple[Path, str]:
        """The model's folder, and `engine.draft_model`."""
        draft_model = self.draft_model if self.draft_model == "mtp" else str(folder / self.draft_model)
        return DEMO if self.model is None else folder / self.model, draft_model


MODELS = {"demo": Trained("eagle3", "eagle3"), "hybrid": Trained("hybrid", "mtp", "hybrid")}
"""By the model that it is for."""


def hybrid_config() -> Qwen3_5TextConfig:
    """Three recurrent layers to one with attention, as published ones have them."""
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0, "mrope_section": [8, 8, 8]}
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=EVERY * DEMO_LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=48, rope_parameters=rope,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip


# ---------------------------------------------------------------- recurrence that a processor can train


def convolution(x_bct: Tensor, weight_ck: Tensor, bias: None, activation: str, **_: object) -> Tensor:
    """Causal, by channel, with SiLU behind it: in place of transformers', which takes ten times as long backwards."""
    width, count = weight_ck.shape[1], x_bct.shape[-1]
    padded = functional.pad(x_bct, (width - 1, 0))
    shifted = [padded[:, :, i : i + count] * weight_ck[:, i : i + 1] for i in range(width)]
    return functional.silu(torch.stack(shifted).sum(0))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks (arXiv 2412.06464), in place of transformers', which solves row by row."""
    (batch, count, key_heads, dim), heads = k.shape, v.shape[2]

    def chunks(x: Tensor) -> Tensor:
        x = functional.pad(x.float().transpose(1, 2), (0, 0, 0, -count % CHUNK))
        return x.reshape(batch, heads, -1, CHUNK, x.shape[-1])

    unit = [functional.normalize(x.float(), dim=-1).repeat_interleave(heads // key_heads, 2) for x in (q, k)]
    q, k, v, beta = chunks(unit[0] * dim**-0.5), chunks(unit[1]), chunks(v), chunks(beta[..., None])
    decay = chunks(g[..., None]).cumsum(-2)
    between = (decay - decay.transpose(-1, -2)).tril().exp().tril()
    power = ((k * beta) @ k.transpose(-1, -2) * between).tril(-1)
    solved = torch.eye(CHUNK) - power
    for _ in range(CHUNK.bit_length() - 2):  # (1 - A)(1 + A²)(1 + A⁴)... is the inverse of 1 + A.
        power = power @ power
        solved = solved + solved @ power
    own, old = solved @ (v * beta), solved @ (k * beta * decay.exp())
    scores, end = (q @ k.transpose(-1, -2)) * between, decay[..., -1:, :]
    q, k = q * decay.exp(), (k * (end - decay).exp()).transpose(-1, -2)
    state, out = torch.zeros(batch, heads, dim, v.shape[-1]) if initial_state is None else initial_state, []
    for at in range(q.shape[2]):
        new = own[:, :, at] - old[:, :, at] @ state
        out.append(q[:, :, at] @ state + scores[:, :, at] @ new)
        state = state * end[:, :, at].exp() + k[:, :, at] @ new
    y = torch.stack(out, 2).flatten(2, 3)[:, :, :count].transpose(1, 2)
    return y, state if options.get("output_final_state") else None


# ---------------------------------------------------------------- what drafts, as it is trained


class Norm(nn.Module):
    """Its weight is around zero, as Qwen 3.5 stores it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1.0 + self.weight, EPS)


class DraftHead(nn.Module):
    """A layer that reads a token and a feature of the position before it."""

    reads, gated = HIDDEN, 1

    def __init__(self) -> None:
        super().__init__()
        self.token_norm, self.feature_norm, self.mlp_norm, self.norm = (Norm(HIDDEN) for _ in range(4))
        self.q = nn.Linear(self.reads, self.gated * HEADS * HEAD_DIM, bias=False)
        self.k, self.v = (nn.Linear(self.reads, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def reads_of(self, hidden: Sequence[Tensor], last: Tensor) -> Tensor:
        """Of the model's hidden states before each layer, and behind the last norm, what features are made of."""
        return last

    def features(self, told: Tensor) -> Tensor:
        """What stands for a position."""
        return told

    def begin(self, demo: Any) -> None:
        """Begin as the demo's last layer."""
        first = of_the_demo(demo, DEMO_LAYERS - 1)
        parts: dict[str, nn.Module] = {"self_attn.o_proj": self.o, "post_attention_layernorm": self.mlp_norm}
        parts |= {f"mlp.{name}_proj": getattr(self, name) for name in ("gate", "up", "down")}
        for name, part in parts.items():
            part.get_parameter("weight").data.copy_(first[name])
        for name in "qkv":
            weight = getattr(self, name).weight.data
            weight.mul_(0.1)[:, -HIDDEN:] = self.product(first, name)
        self.norm.weight.data.copy_(demo.model.norm.weight - 1.0)

    def product(self, first: dict[str, Tensor], name: str) -> Tensor:
        return first[f"self_attn.{name}_proj"]

    def forward(self, embedded: Tensor, before: Tensor, known: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What stands for the feature of each position, and what the head reads, both [B, T, hidden]; `known`: keys and
        values of drafts before, to which its own are added."""
        raise NotImplementedError

    def logits(self, read: Tensor, embed_vh: Tensor) -> Tensor:
        """By default the model's own head, which is its embedding."""
        return read @ embed_vh.T

    def query(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries by head, and gates of what attention gives."""
        return rows, None

    def key(self, rows: Tensor) -> Tensor:
        return rows

    def attend(self, read: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Of draft `n`, over the first keys up to as many positions before, and those of each draft since then."""
        batch, count = read.shape[:2]
        q, gate = self.query(self.q(read).view(batch, count, HEADS, -1))
        k, v = (product(read).view(batch, count, KV_HEADS, -1) for product in (self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in (self.turn(q), self.turn(self.key(k)), v))
        known.append((k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)))
        late = len(known) - 1
        mask = torch.full((count, count), -torch.inf).triu(1 - late)
        scores = [q @ known[0][0].transpose(-1, -2) + mask]
        own = [tuple(x.roll(late - at, 2) for x in pair) for at, pair in enumerate(known) if at]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
        shares = (torch.cat(scores, -1) * HEAD_DIM**-0.5).softmax(-1).nan_to_num()
        out = shares[..., :count] @ known[0][1]
        out = out + sum(shares[..., count + at, None] * v for at, (_, v) in enumerate(own))
        out = out.transpose(1, 2).flatten(2)
        y: Tensor = self.o(out if gate is None else out * gate.flatten(2).sigmoid())
        return y

    def turn(self, x: Tensor) -> Tensor:
        """By rope."""
        half = HEAD_DIM // 2
        angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def mlp(self, x: Tensor) -> Tensor:
        h = self.mlp_norm(x)
        y: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return y

    def tensors(self) -> dict[str, Tensor]:
        """By their published names."""
        raise NotImplementedError

    def _layer(self, below: str) -> dict[str, Tensor]:
        attention = {f"self_attn.{name}_proj": getattr(self, name) for name in "qkvo"}
        mlp = {f"mlp.{name}_proj": getattr(self, name) for name in ("gate", "up", "down")}
        return {f"{below}{name}.weight": part.weight.detach() for name, part in (attention | mlp).items()}


class Eagle3Head(DraftHead):
    """A Llama layer whose attention reads embedding and feature, and whose residual stream is the feature."""

    reads = 2 * HIDDEN

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def reads_of(self, hidden: Sequence[Tensor], last: Tensor) -> Tensor:
        return torch.cat([hidden[tap] for tap in TAPS], -1)

    def features(self, told: Tensor) -> Tensor:
        found: Tensor = self.joined(told)
        return found

    def begin(self, demo: Any) -> None:
        super().begin(demo)
        self.head.weight.data.copy_(demo.model.embed_tokens.weight)
        self.joined.weight.data.mul_(0.1)[:, -HIDDEN:] += torch.eye(HIDDEN)
        self.o.weight.data.mul_(0.5)

    def product(self, first: dict[str, Tensor], name: str) -> Tensor:
        whole = super().product(first, name)
        return whole.view(HEADS, 2, HEAD_DIM, HIDDEN)[:, 0].flatten(0, 1) if name == "q" else whole

    def forward(self, embedded: Tensor, before: Tensor, known: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        read = torch.cat((self.token_norm(embedded), self.feature_norm(before)), -1)
        x = self.mlp(before + self.attend(read, known))
        return x, self.norm(x)

    def logits(self, read: Tensor, embed_vh: Tensor) -> Tensor:
        out: Tensor = self.head(read)
        return out

    def tensors(self) -> dict[str, Tensor]:
        norms = {"midlayer.input_layernorm": self.token_norm, "midlayer.hidden_norm": self.feature_norm,
                 "midlayer.post_attention_layernorm": self.mlp_norm, "norm": self.norm}  # fmt: skip
        around = {"fc.weight": self.joined.weight.detach(), "lm_head.weight": self.head.weight.detach()}
        around |= {f"{name}.weight": 1.0 + norm.weight.detach() for name, norm in norms.items()}
        return self._layer("midlayer.") | around


class MtpHead(DraftHead):
    """Qwen 3.5's layer: embedding and hidden state joined by a product, then a layer with gated attention."""

    gated = 2

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.input_norm, self.q_norm, self.k_norm = Norm(HIDDEN), Norm(HEAD_DIM), Norm(HEAD_DIM)

    def begin(self, demo: Any) -> None:
        super().begin(demo)
        first = of_the_demo(demo, DEMO_LAYERS - 1)
        for part, name in ((self.input_norm, "input_layernorm"), (self.q_norm, "self_attn.q_norm"),
                           (self.k_norm, "self_attn.k_norm")):  # fmt: skip
            part.weight.data.copy_(first[name])
        self.joined.weight.data.mul_(0.1)[:, -HIDDEN:] += torch.eye(HIDDEN)

    def query(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        q, gate = rows.chunk(2, -1)
        return self.q_norm(q), gate

    def key(self, rows: Tensor) -> Tensor:
        out: Tensor = self.k_norm(rows)
        return out

    def forward(self, embedded: Tensor, before: Tensor, known: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x = self.joined(torch.cat((self.token_norm(embedded), self.feature_norm(before)), -1))
        out = self.norm(self.mlp(x + self.attend(self.input_norm(x), known)))
        return out, out

    def tensors(self) -> dict[str, Tensor]:
        norms = {"mtp.layers.0.input_layernorm": self.input_norm, "mtp.layers.0.self_attn.q_norm": self.q_norm,
                 "mtp.layers.0.self_attn.k_norm": self.k_norm, "mtp.layers.0.post_attention_layernorm": self.mlp_norm,
                 "mtp.pre_fc_norm_embedding": self.token_norm, "mtp.pre_fc_norm_hidden": self.feature_norm,
                 "mtp.norm": self.norm}  # fmt: skip
        around = {f"{name}.weight": norm.weight.detach() for name, norm in norms.items()}
        return self._layer("mtp.layers.0.") | around | {"mtp.fc.weight": self.joined.weight.detach()}


# ---------------------------------------------------------------- training


@torch.inference_mode()
def continued(model: Any, asked: Tensor, *, greedy: bool) -> Tensor:
    """What `model` goes on with, [n, TEXT]."""
    how: dict[str, Any] = {} if greedy else {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
    out: Tensor = model.generate(
        asked, max_new_tokens=TEXT - PROMPT, do_sample=not greedy, eos_token_id=None, pad_token_id=0, **how
    )
    return out


class Steps:
    """AdamW over so many steps, whose rate falls. (Muon takes eight times as long on a processor without bf16.)"""

    def __init__(self, module: nn.Module, count: int) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        self.count, self._adam = count, torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def take(self, loss: Tensor, step: int) -> None:
        for group in self._adam.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1.02 - step / self.count)
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self._adam.zero_grad()


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Again and again, in other orders."""
    random = torch.Generator().manual_seed(seed)
    while True:
        shuffled = rows[torch.randperm(len(rows), generator=random)]
        yield from torch.split(shuffled[: len(rows) // size * size], size)


def make_hybrid(demo: Any) -> Any:
    """The demo with three recurrent layers before each of its own, which add nothing yet."""
    model: Any = AutoModelForCausalLM.from_config(hybrid_config(), dtype=torch.float32)
    model.model.embed_tokens.weight.data.copy_(demo.model.embed_tokens.weight)
    model.model.norm.weight.data.copy_(demo.model.norm.weight - 1.0)
    for number, layer in enumerate(model.model.layers):
        if (number + 1) % EVERY:
            layer.linear_attn.out_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        else:
            for name, tensor in of_the_demo(demo, number // EVERY).items():
                layer.get_parameter(f"{name}.weight").data.copy_(tensor)
    return model


def of_the_demo(demo: Any, number: int) -> dict[str, Tensor]:
    """A layer of it as one of Qwen 3.5, by its names: norms around zero, and gates that are half open."""
    tensors = {name.removesuffix(".weight"): t.detach() for name, t in demo.model.layers[number].named_parameters()}
    tensors |= {name: tensor - 1.0 for name, tensor in tensors.items() if "norm" in name}
    q = tensors["self_attn.q_proj"].view(HEADS, HEAD_DIM, HIDDEN)
    tensors["self_attn.q_proj"] = torch.cat((q, torch.zeros_like(q)), 1).flatten(0, 1)
    tensors["self_attn.o_proj"] = 2.0 * tensors["self_attn.o_proj"]
    return tensors


def train_hybrid(model: Any, rows: Tensor, steps: int) -> None:
    """Its recurrent layers learn prose that the demo hasn't seen."""
    own = nn.ModuleList(layer for number, layer in enumerate(model.model.layers) if (number + 1) % EVERY)
    model.requires_grad_(False)
    own.requires_grad_(True)
    optimizers, drawn = Steps(own, steps), batches(rows, 8, seed=1)
    for step, ids in zip(range(steps), drawn, strict=False):
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizers.take(loss, step)
        if step % 10 == 9:
            print(f"hybrid, step {step + 1} of {steps}: loss {float(loss.detach()):.3f}", flush=True)


Told = list[tuple[Tensor, Tensor, Tensor]]
"""Texts, with what a model has for them: what a head's features are made of, and the last hidden states."""


@torch.no_grad()
def tell(head: DraftHead, model: Any, rows: Tensor) -> Told:
    told: Told = []
    for ids in torch.split(rows, 8):
        out = model.model(ids, output_hidden_states=True, use_cache=False)
        told.append((ids, head.reads_of(out.hidden_states, out.last_hidden_state), out.last_hidden_state))
    return told


def train_head(head: DraftHead, model: Any, rows: Tensor, steps: int, name: str) -> None:
    """`head` learns what `model` says of the next tokens of `rows`: the first of them, and in the last third of the
    steps `DEPTH`."""
    optimizers, told = Steps(head, steps), tell(head, model, rows)
    embed_vh = model.model.embed_tokens.weight.detach()
    for step in range(steps):
        ids, features, last = told[step % len(told)]
        target, embedded = (last @ embed_vh.T).log_softmax(-1), embed_vh[ids]
        before, known = head.features(features), list[tuple[Tensor, Tensor]]()
        losses, agreed = [], []
        for depth in range(DEPTH if 4 * step > 3 * steps else 1):
            before = functional.pad(before, (0, 0, 1, 0))[:, :-1]
            before, read = head(embedded, before, known)
            logits = head.logits(read, embed_vh)
            lost = functional.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
            losses.append(lost[:, depth:].mean())
            agreed.append(float((logits.argmax(-1) == target.argmax(-1))[:, depth:].float().mean()))
        optimizers.take(torch.stack([0.8**depth * one for depth, one in enumerate(losses)]).sum(), step)
        if step % 20 == 19 or not step:
            same = ", ".join(f"{share:.2f}" for share in agreed)
            print(f"{name}, step {step + 1} of {steps}: {float(losses[0].detach()):.3f}; likeliest {same}", flush=True)


def write_eagle3(folder: Path, head: Eagle3Head) -> None:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": THETA,
        "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: t.to(torch.bfloat16) for name, t in head.tensors().items()}, folder / "model.safetensors")


def write_hybrid(folder: Path, model: Any, head: MtpHead) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: t.to(torch.bfloat16) for name, t in head.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def prose() -> tuple[Tensor, Tensor]:
    """Beginnings of held-out prose, [n, PROMPT] each: those that are trained on, and those that a bench asks with."""
    text = FILLER.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    rows = torch.tensor(ids[: len(ids) // PROMPT * PROMPT]).view(-1, PROMPT)
    cut = int(TRAINED_ON * len(rows)) // 6 * 6
    return rows[:cut], rows[cut:]


def texts(model: Any, asked: Tensor, count: int) -> Tensor:
    """`count` times `AT_ONCE` texts by `model`, in turns at a temperature and greedy."""
    torch.manual_seed(0)
    rows = torch.split(asked[torch.randperm(len(asked))], AT_ONCE)
    return torch.cat([continued(model, rows[at], greedy=at % 2 == 1) for at in range(count)])


def train(folder: Path, names: Sequence[str], *, said: int = 6, head_steps: int = 600, base_steps: int = 16) -> None:
    """Write what is named of `MODELS` below `folder`. `said`: times `AT_ONCE` texts; the rest are updates of a head,
    and of the hybrid before it has one."""
    if not names:
        return
    began = time.monotonic()
    demo: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    asked, _ = prose()
    rows = texts(demo, asked, said)
    if "demo" in names:
        torch.manual_seed(1)
        eagle3 = Eagle3Head()
        eagle3.begin(demo)
        train_head(eagle3, demo, rows, head_steps, "EAGLE-3")
        write_eagle3(folder / "eagle3", eagle3)
    if "hybrid" in names:
        torch.manual_seed(2)
        hybrid = make_hybrid(demo)
        with trainable_recurrence():
            train_hybrid(hybrid, asked.view(-1, 6 * PROMPT), base_steps)
            torch.manual_seed(3)
            mtp = MtpHead()
            mtp.begin(demo)
            train_head(mtp, hybrid.eval(), rows, head_steps, "MTP")
        write_hybrid(folder / "hybrid", hybrid, mtp)
    print(f"trained in {time.monotonic() - began:.0f} s: {folder}", flush=True)


@contextmanager
def trainable_recurrence() -> Iterator[None]:
    """Have transformers' Qwen 3.5 compute its recurrence by `delta_rule` and `convolution`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule)
        patch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolution)
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1] if sys.argv[1:] else "build/drafts"), list(MODELS))
