"""Train the demo checkpoint on one CPU thread.

    python -m bench.demo_model.train --corpus CORPUS_DIR --work WORK_DIR --output MODEL_DIR [--minutes 90] [--resume]

The data of every step follows from the seed. The schedule follows the clock: ``--minutes`` is the whole budget, and
lengths, mixture and learning rate depend on the share of it that is used. The best model so far is always in
MODEL_DIR; WORK_DIR holds the state that ``--resume`` continues from.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from bench.common.bench_report import flag_parser
from bench.demo_model.corpus_data import EARLY, LATE, MIDDLE, Mix, Mixture
from bench.demo_model.demo_checkpoint import export, make_model, parameters_of, train_tokenizer
from bench.demo_model.made_up_names import FILLER, Prompt, build_prompts, training_names

MUON_RATE = 6e-3
ADAM_RATE = 4e-3
WARMUP_STEPS = 60
DEVELOPMENT_DISTANCES = (50, 100, 200, 300, 500, 700)
DEVELOPMENT_NAMES = 12


@dataclass(frozen=True)
class Stage:
    """A stretch of training, up to a share of the budget."""

    until: float
    length: int
    batch: int
    mix: Mix


STAGES = (
    Stage(0.34, 128, 32, EARLY),
    Stage(0.46, 256, 16, MIDDLE),
    Stage(0.60, 512, 8, MIDDLE),
    Stage(2.00, 1024, 4, LATE),
)


def stage_at(progress: float) -> Stage:
    """The stage that a share of the budget falls in."""
    return next(stage for stage in STAGES if progress < stage.until)


def rate_at(progress: float, step: int) -> float:
    """Warm up, hold, then fall along a cosine in the second half."""
    fall = max(0.0, min(1.0, (progress - 0.45) / 0.55))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))


class Run:
    """Model, optimizers and where they stand."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = make_model()
        matrices, others = parameters_of(self.model)
        self.muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        self.adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0
        self.seconds = 0.0
        self.best = -math.inf

    def save(self, path: Path) -> None:
        """Keep everything that ``load`` needs."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "counters": (self.step, self.seconds, self.best),
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def load(self, path: Path) -> None:
        """Go on from ``save``."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.best = state["counters"]

    def train_step(self, ids: Tensor, weights: Tensor, rate: float) -> float:
        """One update; returns the weighted loss."""
        for group in self.muon.param_groups:
            group["lr"] = MUON_RATE * rate
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        losses = token_losses(self.model, ids)
        wanted = weights[:, 1:].reshape(-1)
        loss = (losses * wanted).sum() / wanted.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.muon.step()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()
        return float(loss.detach())


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of each next token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].reshape(-1), reduction="none")


def copied_share(model: nn.Module, tokenizer: Tokenizer, prompts: Iterable[Prompt]) -> float:
    """How many names greedy decoding would copy: every token of the name must be the most likely one."""
    results: list[bool] = []
    for prompt in prompts:
        context = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        answer = tokenizer.encode(f" {prompt.name}.", add_special_tokens=False).ids
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.tensor([context + answer])).logits
        guesses = logits[0, len(context) - 1 : -1].argmax(-1).tolist()
        results.append(guesses == answer)
    return sum(results) / len(results)


class Judge:
    """Measures a model on held-out prose and on names of its own (neither trained on nor in the final measurement)."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._words = text.split()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        self._prose = torch.tensor(ids[: 24 * 513]).view(24, 513)
        used = set(training_names(40_000, seed=0))
        self._names = [name for name in training_names(60_000, seed=99) if name not in used][:DEVELOPMENT_NAMES]

    @torch.inference_mode()
    def judge(self, model: nn.Module) -> tuple[float, dict[int, float]]:
        """Loss on held-out prose, and the share of names copied at each distance."""
        loss = float(token_losses(model, self._prose).mean())
        shares = {
            distance: copied_share(
                model, self._tokenizer, build_prompts(distance, self._words, self._tokenizer, self._names)
            )
            for distance in DEVELOPMENT_DISTANCES
        }
        return loss, shares


def report(run: Run, judge: Judge, tokenizer: Tokenizer, output: Path, work: Path) -> None:
    """Print how the model does, save the state, and export it if it is the best so far."""
    loss, shares = judge.judge(run.model)
    score = sum(shares.values()) / len(shares) - loss
    curve = " ".join(f"{distance}:{share:.2f}" for distance, share in shares.items())
    print(f"eval step {run.step} minute {run.seconds / 60:.1f} prose loss {loss:.3f} copied {curve}", flush=True)
    if score >= run.best:
        run.best = score
        export(run.model, tokenizer, output)
    run.save(work / "state.pt")


def train(arguments: argparse.Namespace) -> None:
    """The whole run."""
    torch.set_num_threads(arguments.threads)
    corpus, work, output = arguments.corpus, arguments.work, arguments.output
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus / "train.txt")
    paragraphs = (corpus / "train.txt").read_text(encoding="utf-8").splitlines()
    mixture = Mixture(tokenizer, paragraphs, seed=arguments.seed)
    judge = Judge(tokenizer, FILLER.read_text(encoding="utf-8"))
    run = Run(arguments.seed)
    if arguments.resume:
        run.load(work / "state.pt")
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"{parameters} parameters, {mixture.prose_tokens} tokens of prose", flush=True)

    budget = arguments.minutes * 60
    next_report = run.seconds + arguments.eval_minutes * 60
    last = time.monotonic()
    while run.seconds < budget:
        progress = run.seconds / budget
        stage = stage_at(progress)
        ids, weights = mixture.batch(run.step, stage.batch, stage.length, stage.mix)
        loss = run.train_step(ids, weights, rate_at(progress, run.step))
        run.step += 1
        now = time.monotonic()
        run.seconds += now - last
        last = now
        if run.step % 50 == 0:
            print(f"step {run.step} minute {run.seconds / 60:.1f} length {stage.length} loss {loss:.3f}", flush=True)
        if run.seconds >= next_report:
            report(run, judge, tokenizer, output, work)
            next_report = run.seconds + arguments.eval_minutes * 60
    report(run, judge, tokenizer, output, work)


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder for the training state")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=90.0, help="wall-clock budget")
    parser.add_argument("--eval-minutes", type=float, default=3.0, help="time between evaluations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the state in --work")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
