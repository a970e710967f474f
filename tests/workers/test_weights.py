"""Answers over changes of weights: real workers of both roles and the router core, stepped by hand; the oracle of each
version is transformers with that version's folder."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.stepped_cluster import Company, company
from twinpool.contracts.checkpoint.model_spec import read_model_spec, with_weights
from twinpool.contracts.errors import CheckpointError, ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.sampling_params import SamplingParams, WeightsVersion
from twinpool.engine.runner.load_model import check_finite

pytestmark = pytest.mark.slow
CHANGES = 12
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint, and folders with other weights of its shapes."""
    root = tmp_path_factory.mktemp("versions")
    return [make_checkpoint(root / f"v{seed}", eos=None, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def oracles(folders: list[Path]) -> list[Oracle]:
    return [Oracle(folder) for folder in folders]


def told_weights(both: Company, weights: WeightsVersion) -> None:
    """The controller has changed to these, as routers hear it."""
    both.weights = weights
    both.core.workers.served = ServedWeights(weights, behind=len(both.workers))


def replace_all(both: Company, role: Role) -> None:
    """Workers of a role drain, leave, and come back with the company's weights."""
    names = [name for name in both.workers if name.startswith(role)]
    for name in names:
        both.drain(name)
    both.until(lambda: all(both.workers[name].drained for name in names), f"{role} workers to leave")
    for name in names:
        both.gone(name)
        both.start(role, name)


def change(both: Company, weights: WeightsVersion) -> None:
    """All workers change, prefill workers first, as the controller has them."""
    told_weights(both, weights)
    for name in both.workers:  # Routers send decode workers nothing new from now on.
        both.core.workers.named(name).request_drain(both.clock.now())  # type: ignore[union-attr]
    replace_all(both, Role.PREFILL)
    replace_all(both, Role.DECODE)
    both.core.workers.served = ServedWeights(weights)


def test_answers_are_wholly_of_the_version_that_they_name_over_many_changes(
    folders: list[Path], oracles: list[Oracle]
) -> None:
    rng = random.Random(5)
    asked: list[tuple[RequestId, list[int]]] = []
    roots = str(folders[0].parent)
    with company(folders[0], decodes=2, engine={"weight_roots": roots}) as both:
        both.weights = WeightsVersion(0)

        def ask(count: int) -> None:
            for _ in range(count):
                prompt = [rng.randrange(300) for _ in range(rng.choice([20, 40, 70]))]
                asked.append((both.submit(prompt, GREEDY), prompt))

        for number in range(1, CHANGES + 1):
            ask(3)
            for _ in range(rng.randrange(12)):
                both.step()
            version = number % 3
            weights = WeightsVersion(number, f"v{version}", str(folders[version]))
            change(both, weights)
            ask(2)
            for _ in range(rng.randrange(6)):
                both.step()
        both.run()
        seen = set()
        for rid, prompt in asked:
            told = both.told[rid]
            version = int(told.request.weights.removeprefix("v")) if told.request.weights.startswith("v") else 0
            seen.add(version)
            verdict = compare(oracles[version], prompt, told.tokens)
            assert verdict.equal, (rid, told.request.weights, verdict)
        assert seen == {0, 1, 2}


def test_no_tier_gives_pages_of_other_weights(folders: list[Path], oracles: list[Oracle], tmp_path: Path) -> None:
    prompt = [random.Random(8).randrange(300) for _ in range(96)]
    storage = {"backend": "file", "path": str(tmp_path / "pages")}
    cache = {"host_bytes": 1 << 24, "storage": storage}
    with company(folders[0], decodes=1, engine={"weight_roots": str(folders[0].parent)}, cache=cache) as both:
        for number, version, found in ((1, 1, False), (2, 1, False), (3, 2, False)):
            # The second is a flush: the same weights under another number.
            change(both, WeightsVersion(number, f"v{version}", str(folders[version])))
            cached = []
            for _ in range(2):
                rid = both.submit(prompt, GREEDY)
                both.run(rid)
                assert compare(oracles[version], prompt, both.told[rid].tokens).equal
                reports = [one for one in both.told[rid].request.progress if one.role is Role.PREFILL]
                cached.append(sum(one.cached_tokens for one in reports))
            assert (cached[0] > 0) is found, "nothing of before is found"
            assert cached[1] > 0, "what it has computed itself is"
            both.settle()


def test_an_answer_of_which_something_was_told_ends_where_its_weights_are_gone_and_others_begin_anew(
    folders: list[Path], oracles: list[Oracle]
) -> None:
    with company(folders[0], decodes=1, engine={"weight_roots": str(folders[0].parent)}) as both:
        change(both, WeightsVersion(1, "v1", str(folders[1])))
        prompt = [random.Random(9).randrange(300) for _ in range(40)]
        begun, fresh = (both.submit(prompt, SamplingParams(max_tokens=200, temperature=0.0)) for _ in range(2))
        both.until(lambda: len(both.told[begun].tokens) > 3, "some tokens")
        late = both.submit(prompt[:30], GREEDY)
        told_weights(both, WeightsVersion(2, "v2", str(folders[2])))
        for name in list(both.workers):
            both.workers[WorkerName(name)].end_requests("it had waited for long enough")
            both.drain(name)
        replace_all(both, Role.PREFILL)
        replace_all(both, Role.DECODE)
        both.core.workers.served = ServedWeights(WeightsVersion(2, "v2", str(folders[2])))
        both.until(lambda: all(told.done is not None for told in both.told.values()), "all ends")
        for rid in (begun, fresh):
            done = both.told[rid].done
            assert done is not None
            if both.told[rid].request.weights == "v1":
                assert done.error is ErrorKind.OVERLOADED
                assert "the weights were changed while it was answered" in done.message
        assert both.told[late].request.weights == "v2"
        assert compare(oracles[2], prompt[:30], both.told[late].tokens).equal


def test_folders_with_other_tensors_other_files_or_values_that_are_not_finite_are_refused(
    folders: list[Path], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    spec, root = read_model_spec(folders[0]), str(tmp_path)
    tensors = load_file(folders[1] / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)

    def folder(what: str, changed: dict[str, torch.Tensor]) -> WeightsVersion:
        (tmp_path / what).mkdir()
        save_file(changed, tmp_path / what / "model.safetensors", metadata={"format": "pt"})
        return WeightsVersion(1, what, str(tmp_path / what))

    for what, changed, words in (
        ("lacks", {key: value for key, value in tensors.items() if key != name}, f"lacks the tensor {name}"),
        ("more", tensors | {"more": tensors[name].clone()}, "has the tensor more, which the checkpoint lacks"),
        ("shape", tensors | {name: tensors[name][:, :-1].contiguous()}, "the checkpoint's is F32"),
        ("dtype", tensors | {name: tensors[name].half()}, "is F16"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            with_weights(spec, folder(what, changed), root)
    sound = folder("sound", tensors)
    read = with_weights(spec, sound, root)
    check_finite(read)
    assert read.weights is not None
    with pytest.raises(CheckpointError, match="has other files than those"):
        with_weights(spec, WeightsVersion(1, "x", sound.path, "0" * 64), root)
    with pytest.raises(CheckpointError, match="lies below none of"):
        with_weights(spec, sound, str(folders[0]))
    bad = tensors[name].clone()
    bad[1, 2] = float("nan")
    with pytest.raises(CheckpointError, match="aren't finite"):
        check_finite(with_weights(spec, folder("nan", tensors | {name: bad}), root))
