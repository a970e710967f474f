"""The engine: a batch in, drawn tokens and written pages out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cache.device import DEVICE, Device, Op, Span, Stream
from cache.epochs import EpochTable
from cache.gate import Door, Gate
from contracts.config import EngineConfig
from contracts.errors import ConfigError
from contracts.model import ModelSpec
from engine.attention import Attention, make_plan
from engine.batch import Row, RowOutput, Step
from engine.checkpoint import Weights, dtype_for, load_weights
from engine.model import FULL_POOL, Decoder
from engine.numerics import FAST, Numerics, probe
from engine.sampling import Draws, Logprobs, draw_tokens, token_logprobs
from engine.step import Computed, LaunchedStep, input_tokens
from engine.torch_attention import BLOCK_TOKENS, TorchAttention

_LOGIT_ELEMENTS = 1 << 23
"""Logits computed at once when prompts are scored: 32 MiB in float32."""


class Engine:
    """Computes steps of one model over one gate's buffers."""

    def __init__(
        self, model: Decoder, gate: Gate, epochs: EpochTable, page_tokens: int, config: EngineConfig, device: Device
    ) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.config = config
        self._gate = gate
        self._epochs = epochs
        self._device = device

    @property
    def device(self) -> Device:
        return self._device

    def launch(self, rows: Sequence[Row]) -> Step:
        """Give the device one step: write the rows' state, draw where a row asks for it, score where it asks.

        Returns as soon as the device has it, which on a CPU is when it is complete. Rows are read when it runs: they
        must not change.
        """
        assert rows, "a step has at least one row"
        for row in rows:
            assert len(row.tokens), "a row has at least one token"
            assert len(row.epochs) == len(row.pages), "a block table has an epoch for each page"
            assert len(row.pages) * self.page_tokens >= row.start + len(row.tokens), "the block table is too short"
        read, written = self._spans(rows)
        op = Op("forward", Stream.COMPUTE, reads=(read,), writes=(written,))
        passage = self._gate.enter(FULL_POOL)
        step = LaunchedStep(rows)
        step.completion = self._device.submit(op, lambda: step.fill(self._step(rows, passage)), gates=passage.gates)
        return step

    def forward(self, rows: Sequence[Row]) -> list[RowOutput]:
        """Launch one step and wait for it: one output a row, in order."""
        return self.launch(rows).outputs()

    @torch.inference_mode()
    def _step(self, rows: Sequence[Row], door: Door) -> Computed:
        device = self._device.torch_device
        counts = [len(row.tokens) for row in rows]
        tables, epochs = [r.pages for r in rows], [r.epochs for r in rows]
        plan = make_plan([r.start for r in rows], counts, tables, self.page_tokens, device, epochs)
        plan, stale_b = self.model.guarded(plan, self._epochs.on(device))
        padding = self.model.numerics.padded(sum(counts)) - sum(counts)
        positions = [p for row in rows for p in range(row.start, row.start + len(row.tokens))] + [0] * padding
        x_mh = self.model.forward(
            input_tokens(rows, padding, device),
            torch.tensor(positions, device=device),
            max(positions) + 1,
            plan,
            door,
        )
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        drawing = [i for i, row in enumerate(rows) if row.draw is not None]
        draws = self._draw(rows, x_mh, firsts, drawing) if drawing else None
        scores = [tuple(self._score(row, x_mh[first:])) for row, first in zip(rows, firsts, strict=True)]
        return Computed(drawing, draws, scores, stale_b)

    def _draw(self, rows: Sequence[Row], x_mh: Tensor, firsts: Sequence[int], drawing: Sequence[int]) -> Draws:
        last = [firsts[i] + len(rows[i].tokens) - 1 for i in drawing]
        wanted = [draw for row in rows if (draw := row.draw) is not None]
        return draw_tokens(self.model.logits(x_mh[last]), wanted)

    def _score(self, row: Row, x_th: Tensor) -> Iterator[Logprobs]:
        """Log-probabilities of the tokens that follow, some rows of logits at a time."""
        follow = torch.tensor(row.score or (), dtype=torch.int64, device=x_th.device)
        step = max(1, _LOGIT_ELEMENTS // self.model.spec.vocab_size)
        for begin in range(0, len(follow), step):
            part = follow[begin : begin + step]
            logits_nv = self.model.logits(x_th[begin : begin + len(part)])
            yield token_logprobs(logits_nv, part, [row.score_top] * len(part))

    def _spans(self, rows: Sequence[Row]) -> tuple[Span, Span]:
        size = self.page_tokens
        read: set[int] = set()
        written: set[int] = set()
        for row in rows:
            end = -(-(row.start + len(row.tokens)) // size)
            read.update(row.pages[:end])
            written.update(row.pages[row.start // size : end])
        return Span(DEVICE, FULL_POOL, sorted(read)), Span(DEVICE, FULL_POOL, sorted(written))


def load_engine(
    spec: ModelSpec, config: EngineConfig, page_tokens: int, gate: Gate, epochs: EpochTable, device: Device
) -> Engine:
    """Load the checkpoint behind `spec` and bind it to `gate`, whose buffers are those of `pool_set_spec`.

    `epochs` is the table of the allocator that hands out the gate's pages.
    Sets torch's threads to `config.threads` unless that is 0. Raises `CheckpointError` for a checkpoint that can't be
    read and `ConfigError` for an attention backend that can't run here.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch_device = device.torch_device
    weights = load_weights(spec, dtype_for(spec, config), torch_device)
    numerics = numerics_for(spec, weights, config, torch_device)
    attention = attention_for(config, numerics, torch_device)
    model = Decoder(spec, weights, attention, numerics, torch_device)
    return Engine(model, gate, epochs, page_tokens, config, device)


def numerics_for(spec: ModelSpec, weights: Weights, config: EngineConfig, device: torch.device) -> Numerics:
    """How products are computed here, found by trying the model's own shapes unless `config.numerics` is ``fast``."""
    if config.numerics == "fast":
        return FAST
    layer = weights.layers[0]
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down, weights.head)
    products = [
        (batch, k, n)
        for batch in (spec.kv_heads, 5 * spec.kv_heads)
        for k, n in ((spec.head_dim, BLOCK_TOKENS), (BLOCK_TOKENS, spec.head_dim))
    ]
    with torch.inference_mode():
        return probe(linears, products, device)


def attention_for(config: EngineConfig, numerics: Numerics, device: torch.device) -> Attention:
    """The attention backend that `config.attention` names; raises `ConfigError` if it can't run on `device`."""
    wanted = config.attention
    if wanted == "auto":
        wanted = "triton" if device.type == "cuda" else "torch"
    if wanted == "torch":
        return TorchAttention(numerics)
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "engine.attention=triton needs an NVIDIA GPU; set engine.attention=torch, or TRITON_INTERPRET=1 to run "
            "the kernels in Triton's interpreter"
        )
    try:
        from engine.triton_attention import TritonAttention
    except ImportError as error:
        raise ConfigError(f"engine.attention=triton needs the triton package: {error}") from None
    return TritonAttention()
