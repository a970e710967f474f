"""What drafts is trained as it is served, and the bench of drafts compares tokens and tells what they gain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from bench.common.random_model import DEMO
from bench.serving import draft_gain
from tests.support import trained_drafts
from tests.support.draft_gain import DraftGain
from tests.support.plain_drafts import PlainEagle3, PlainMtp, PlainQwenMtp
from tests.support.trained_drafts import DraftHead, Eagle3Head, MtpHead, convolution, delta_rule, make_hybrid

DEPTH = trained_drafts.DEPTH


def test_the_recurrence_that_is_trained_is_transformers_own() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 77, 2, 16) for _ in range(2))
    v, g, beta = torch.randn(2, 77, 4, 24), -torch.rand(2, 77, 4), torch.rand(2, 77, 4)
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want = modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)
    for found, expected in zip(delta_rule(q, k, v, g, beta, **options), want, strict=True):
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-5)
    x, weight = torch.randn(2, 6, 20), torch.randn(6, 4)
    plain = functional.silu(functional.conv1d(x, weight[:, None], padding=3, groups=6)[..., :20])
    assert torch.allclose(convolution(x, weight, None, "silu"), plain, atol=1e-5)


@pytest.fixture(scope="module")
def demo() -> Any:
    factory: Any = AutoModelForCausalLM
    return factory.from_pretrained(DEMO, dtype=torch.float32).eval()


def spread(head: DraftHead, demo: Any) -> DraftHead:
    """With numbers of which bfloat16 loses nothing, and that matter."""
    head.begin(demo)
    for parameter in head.parameters():
        noise = torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.5 * parameter.shape[1] ** -0.5)
        parameter.data.add_(noise).copy_(parameter.to(torch.bfloat16).float())
    return head


@torch.no_grad()
def unrolled(head: DraftHead, model: Any, tokens: Sequence[int]) -> list[int]:
    """What the head as it is trained says behind `tokens`."""
    embed_vh, found = model.model.embed_tokens.weight, list[int]()
    told = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False)
    for depth in range(DEPTH):
        ids = torch.tensor([[*tokens, *found]])
        reads = head.reads_of(told.hidden_states, told.last_hidden_state)
        before = functional.pad(head.features(reads), (0, 0, 0, 1 + depth))
        known: list[tuple[Tensor, Tensor]] = []
        for _ in range(depth + 1):
            before, read = head(embed_vh[ids], functional.pad(before, (0, 0, 1, 0))[:, :-1], known)
        found.append(int(head.logits(read[0, -1], embed_vh).argmax()))
    return found


def texts() -> list[list[int]]:
    return [row[: 9 + 7 * at].tolist() for at, row in enumerate(trained_drafts.prose()[1][:3])]


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_drafts_is_trained_as_the_plain_definition_of_what_is_served(kind: str, demo: Any, tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain: PlainEagle3 | PlainMtp
    if kind == "eagle3":
        head = spread(Eagle3Head(), demo)
        assert isinstance(head, Eagle3Head)
        trained_drafts.write_eagle3(tmp_path, head)
        model, plain = demo, PlainEagle3(DEMO, tmp_path)
    else:
        head, model = spread(MtpHead(), demo), make_hybrid(demo).eval()
        assert isinstance(head, MtpHead)
        trained_drafts.write_hybrid(tmp_path, model, head)
        model, plain = model.float(), PlainQwenMtp(tmp_path)
    said = [unrolled(head, model, tokens) for tokens in texts()]
    assert said == [plain.proposals(tokens, DEPTH) for tokens in texts()]
    assert len({tuple(one) for one in said}) == len(said), "they hang on the text"


@pytest.mark.slow
def test_the_hybrid_begins_as_the_demo(demo: Any) -> None:
    ids = torch.tensor([texts()[2]])
    with torch.no_grad():
        assert torch.allclose(make_hybrid(demo).eval()(ids).logits, demo(ids).logits, atol=1e-3)


@pytest.mark.slow
def test_the_bench_trains_what_lacks_and_compares_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few: dict[str, int] = {"said": 2, "head_steps": 4, "base_steps": 2}
    monkeypatch.setattr(trained_drafts, "AT_ONCE", 8)
    monkeypatch.setattr(trained_drafts, "TEXT", 40)
    train = trained_drafts.train
    monkeypatch.setattr(draft_gain, "train", lambda folder, names: train(folder, names, **few))
    out = tmp_path / "out.json"
    flags = [
        "--folder",
        str(tmp_path / "drafts"),
        "--streams",
        "2",
        "--tokens",
        "6",
        "--rounds",
        "1",
        "--json",
        str(out),
    ]
    assert draft_gain.main(flags) == 0
    assert "trained in" in capsys.readouterr().out
    gains = json.loads(out.read_text())["gains"]
    assert [(one["model"], one["temperature"]) for one in gains] == [
        (m, t) for m in ("demo", "hybrid") for t in (0, 0.8)
    ]
    assert all(one["equal"] and min(*one["without"], *one["drafted"]) > 0 for one in gains)
    # What is there isn't trained again, and a wrong token is an error.
    monkeypatch.setattr(DraftGain, "equal", property(lambda gain: False, lambda gain, value: None), False)
    assert draft_gain.main([*flags, "--models", "demo", "--temperatures", "0"]) == 1
    assert "trained in" not in capsys.readouterr().out
