"""Adapters (LoRA) on a prefill and a decode worker: rows of several in one step, hand-overs, what each may find."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.model_families import FAMILIES
from tests.support.served_cluster import until
from tests.support.stepped_cluster import Company, company
from tests.support.worker_pair import SESSION, Answer, Pair, pair
from tests.workers.test_violations import behind_a_router
from twinpool.contracts.checkpoint.adapter_files import adapter_ref
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.stream_frames import ADAPTERS_SINCE
from twinpool.contracts.messages.worker_events import Audited
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams

RANKS = (4, 7, 12, 64)
ALPHAS = (16, 3, 24, 64)


@dataclass(frozen=True)
class Family:
    """A checkpoint, adapters of it, and for each of these an oracle that has it merged in."""

    folder: Path
    adapters: tuple[AdapterRef, ...]
    root: Path

    @cached_property
    def oracles(self) -> dict[str, Oracle]:
        found = {"": Oracle(self.folder)}
        for one in self.adapters:
            found[one.name] = Oracle(merged(self.root / "merged" / one.name, self.folder, Path(one.path)))
        return found


def family(root: Path, kind: str) -> Family:
    folder = make_checkpoint(root / "model", kind, seed=3)
    made = []
    for number, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True)):
        path = make_adapter(
            root / f"adapter-{number}", folder, rank, seed=number, lora_alpha=alpha, use_rslora=number == 1
        )
        made.append(adapter_ref(f"{kind}-{number}", str(path), [str(root)], 64))
    return Family(folder, tuple(made), root)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(params=["llama", "qwen"])
def each(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(n)] for n in lengths]


def ask(both: Pair, prompt: Sequence[int], count: int, adapter: AdapterRef | None, **options: object) -> RequestId:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, adapter=adapter)
    salt = "" if adapter is None else adapter.salted("")
    return both.submit(prompt, sampling, salt=salt, **options)  # type: ignore[arg-type]


def expect(made: Family, adapter: AdapterRef | None, prompt: Sequence[int], answer: Answer) -> None:
    verdict = compare(made.oracles["" if adapter is None else adapter.name], prompt, answer.list)
    assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["local", "shm", "zmq"])
def test_answers_of_many_adapters_in_one_batch_are_those_of_models_with_each_merged_in(
    each: Family, plane: str
) -> None:
    chosen = [None, *each.adapters, each.adapters[0]]
    asked = prompts(1, 40, 5, 17, 33, 64, 21)
    with pair(each.folder, transfer={"plane": plane}, adapters={"roots": str(each.root)}) as both:
        requests = [ask(both, p, 10, adapter) for p, adapter in zip(asked, chosen, strict=True)]
        for prompt, adapter, answer in zip(asked, chosen, both.run(*requests), strict=True):
            expect(each, adapter, prompt, answer)
            assert answer.progress[Role.DECODE].cached_tokens == 0


@pytest.mark.slow
def test_workers_that_share_their_experts_have_adapters_of_what_is_their_own(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_moe"](tmp_path / "model")
    path = make_adapter(tmp_path / "adapter", folder, 4, without=".experts.")
    made = Family(folder, (adapter_ref("one", str(path), [str(tmp_path)], 64),), tmp_path)
    asked = [[token % 90 for token in prompt] for prompt in prompts(5, 40, 17)]
    sections: dict[str, Any] = {"transfer": {"plane": "shm"}, "prefill": {"dp": 2}, "decode": {"dp": 2}}
    with pair(folder, adapters={"roots": str(tmp_path)}, **sections) as both:
        chosen = [*made.adapters, None]
        requests = [ask(both, prompt, 8, adapter) for prompt, adapter in zip(asked, chosen, strict=True)]
        for prompt, adapter, answer in zip(asked, chosen, both.run(*requests), strict=True):
            expect(made, adapter, prompt, answer)


def test_pages_of_an_adapter_are_found_by_itself_alone(llama: Family) -> None:
    (prompt,) = prompts(2, 64)
    one, other = llama.adapters[:2]
    with pair(llama.folder, adapters={"roots": str(llama.root)}) as both:
        for adapter, cached in ((None, 0), (one, 0), (other, 0), (one, 48), (None, 48)):
            (answer,) = both.run(ask(both, prompt, 6, adapter))
            expect(llama, adapter, prompt, answer)
            assert answer.progress[Role.PREFILL].cached_tokens == cached


def test_an_audit_is_computed_with_its_adapter_which_stays_as_long_as_it_runs(llama: Family) -> None:
    (prompt,), (one, other) = prompts(2, 64), llama.adapters[:2]
    settings = {"roots": str(llama.root), "max_loaded": 1}
    with pair(llama.folder, adapters=settings, audit={"chunk_tokens": 16}) as both:
        (answer,) = both.run(ask(both, prompt, 6, one))
        both.settle()

        def audit(adapter: AdapterRef | None) -> Audit:
            sampling = SamplingParams(max_tokens=6, temperature=0.0, adapter=adapter)
            return Audit(RequestId("audit"), 0, (*prompt, *answer.list), len(prompt), sampling)

        for adapter, alike in ((one, True), (None, False)):
            both.prefill.handle(SESSION, audit(adapter))
            (told,) = [event for _ in range(20) for _, event in both.prefill.step() if isinstance(event, Audited)]
            assert (told.checked, told.differing == 0) == (6, alike)
        both.answers[RequestId("audit")] = Answer()  # The pair passes its end over.
        both.prefill.handle(SESSION, audit(one))
        both.prefill.step()
        (answer,) = both.run(ask(both, prompt, 6, other))
        expect(llama, other, prompt, answer)


def test_an_adapter_whose_files_change_is_another_one_and_the_old_one_is_refused(llama: Family, tmp_path: Path) -> None:
    (prompt,), roots = prompts(3, 40), {"roots": str(tmp_path)}
    path = Path(shutil.copytree(llama.adapters[0].path, tmp_path / "a"))
    old = adapter_ref("same", str(path), [str(tmp_path)], 64)
    with pair(llama.folder, adapters={**roots, "max_loaded": 1}) as both:
        (before,) = both.run(ask(both, prompt, 6, old))
        expect(llama, llama.adapters[0], prompt, before)
        shutil.copytree(llama.adapters[2].path, path, dirs_exist_ok=True)
        new = adapter_ref("same", str(path), [str(tmp_path)], 64)
        (after,) = both.run(ask(both, prompt, 6, new))
        expect(llama, llama.adapters[2], prompt, after)
        assert after.progress[Role.PREFILL].cached_tokens == 0
        (refused,) = both.run(ask(both, prompt, 6, old))
        assert refused.done is not None
        assert refused.done.error is ErrorKind.ADAPTER
        assert "are others than when it was loaded" in refused.done.message


def test_the_least_recently_wanted_adapter_makes_way_and_one_that_a_request_needs_does_not(llama: Family) -> None:
    asked = prompts(4, 30, 31, 32, 33)
    with pair(llama.folder, adapters={"roots": str(llama.root), "max_loaded": 2}) as both:
        running = ask(both, asked[0], 40, llama.adapters[0])
        while len(both.answers[running].tokens) < 5:
            both.step()
        for prompt, adapter in zip(asked[1:], llama.adapters[1:], strict=True):
            (answer,) = both.run(ask(both, prompt, 5, adapter))
            expect(llama, adapter, prompt, answer)
            assert llama.adapters[0].digest in both.decode.status().adapters
            assert len(both.decode.status().adapters) <= 2
        (first,) = both.run(running)
        expect(llama, llama.adapters[0], asked[0], first)
        assert both.decode.status().counters["adapter_evictions"] == 2


def test_a_request_waits_for_room_while_others_need_all_adapters_that_a_worker_may_hold(llama: Family) -> None:
    asked = prompts(5, 20, 21)
    with pair(llama.folder, adapters={"roots": str(llama.root), "max_loaded": 1}) as both:
        requests = [ask(both, p, 12, a) for p, a in zip(asked, llama.adapters, strict=False)]
        for prompt, adapter, answer in zip(asked, llama.adapters, both.run(*requests), strict=False):
            expect(llama, adapter, prompt, answer)


@pytest.mark.parametrize("wrong", ["of another", "of none", "without"])
def test_a_request_whose_salt_and_adapter_do_not_agree_is_refused(llama: Family, wrong: str) -> None:
    one, other = llama.adapters[:2]
    adapter, salt = {"of another": (one, other.salted("")), "of none": (one, ""), "without": (None, one.salted(""))}[
        wrong
    ]
    with pair(llama.folder, adapters={"roots": str(llama.root)}) as both:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, adapter=adapter)
        (answer,) = both.run(both.submit([1, 2, 3], sampling, salt=salt))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.INVALID
        assert answer.tokens == {}


@pytest.mark.parametrize(
    ("settings", "says"), [({}, "takes no adapters"), ({"roots": "/nowhere"}, "below none of adapters.roots")]
)
def test_an_adapter_that_a_worker_may_not_read_is_refused_in_words(
    llama: Family, settings: dict[str, str], says: str
) -> None:
    with pair(llama.folder, adapters=settings) as both:
        (answer,) = both.run(ask(both, [1, 2, 3], 4, llama.adapters[0]))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.ADAPTER
        assert says in answer.done.message


def test_retracted_requests_come_back_with_their_adapters(llama: Family) -> None:
    chosen = [None, *llama.adapters]
    asked = prompts(6, 30, 41, 22, 35, 18)
    config: dict[str, Any] = {"faults": {"retract_every": 3}, "cache": {"host_bytes": 1 << 22}}
    with pair(llama.folder, adapters={"roots": str(llama.root)}, **config) as both:
        requests = [ask(both, p, 16, adapter) for p, adapter in zip(asked, chosen, strict=True)]
        for prompt, adapter, answer in zip(asked, chosen, both.run(*requests), strict=True):
            expect(llama, adapter, prompt, answer)
        assert both.decode.status().counters["retractions"] > 0


def begun(c: Company, made: Family, count: int) -> dict[RequestId, tuple[list[int], AdapterRef | None]]:
    """Requests of every adapter and of none, in the middle of their answers."""
    asked = {}
    for prompt, adapter in zip(prompts(7, 30, 41, 22, 35, 18), [None, *made.adapters], strict=True):
        sampling = SamplingParams(max_tokens=count, temperature=0.0, adapter=adapter)
        salt = "" if adapter is None else adapter.salted("")
        asked[c.submit(prompt, sampling, salt=salt)] = prompt, adapter
    c.until(lambda: all(len(c.told[rid].tokens) > 4 for rid in asked), "all to run")
    return asked


def expect_all(c: Company, made: Family, asked: dict[RequestId, tuple[list[int], AdapterRef | None]]) -> None:
    for (prompt, adapter), answer in zip(asked.values(), c.run(*asked), strict=True):
        verdict = compare(made.oracles["" if adapter is None else adapter.name], prompt, answer)
        assert verdict.equal, verdict


def test_answers_go_on_with_their_adapters_on_another_worker_after_one_is_lost(llama: Family) -> None:
    with company(llama.folder, adapters={"roots": str(llama.root)}) as c:
        asked = begun(c, llama, 48)
        lost = [rid for rid in asked if c.worker_of(rid) == "decode-0"]
        assert 0 < len(lost) < len(asked)
        c.gone("decode-0")
        expect_all(c, llama, asked)
        assert all(c.told[rid].replays for rid in lost)


def test_answers_of_a_drained_worker_move_with_their_adapters(llama: Family) -> None:
    with company(llama.folder, adapters={"roots": str(llama.root)}) as c:
        asked = begun(c, llama, 40)
        c.drain("decode-0")
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to be empty", 1_000_000)
        expect_all(c, llama, asked)
        assert c.core.migrations.counts.migrated > 0
        assert not any(told.replays for told in c.told.values()), "nothing was computed again"


def test_an_older_worker_gets_no_request_with_an_adapter(llama: Family) -> None:
    with company(llama.folder, adapters={"roots": str(llama.root)}) as c:
        for entry in c.core.workers:
            if entry.record.name == "decode-0":
                entry.record = structs.replace(entry.record, stream="there", stream_protocol=ADAPTERS_SINCE - 1)
        asked = begun(c, llama, 64)
        for rid, (_, adapter) in asked.items():
            assert adapter is None or c.worker_of(rid) == "decode-1"
        expect_all(c, llama, asked)


@contextmanager
def endpoint(both: Pair, made: Family) -> Iterator[httpx.Client]:
    """The pair's workers behind the real router, in this process."""
    config = config_from_dict({"adapters": {"roots": str(made.root)}})
    with behind_a_router(both, made.folder, config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.slow
def test_clients_choose_adapters_that_operators_load_and_drop_while_it_serves(llama: Family) -> None:
    one, other = llama.adapters[:2]
    (short,), (long,) = prompts(8, 30), prompts(9, 900)

    def post(path: str, **body: Any) -> httpx.Response:
        return client.post(path, json=body)

    def answer(prompt: list[int], model: str) -> httpx.Response:
        return post("/v1/completions", model=model, prompt=prompt, max_tokens=8, temperature=0, return_token_ids=True)

    with pair(llama.folder, settle=False, adapters={"roots": str(llama.root)}) as both, endpoint(both, llama) as client:
        assert answer(short, one.name).status_code == 404
        for adapter in (one, other):
            assert post("/v1/load_lora_adapter", lora_name=adapter.name, lora_path=adapter.path).status_code == 200
        until(lambda: len(client.get("/v1/models").json()["data"]) == 3, "the router to be told")
        listed = {row["id"]: row["parent"] for row in client.get("/v1/models").json()["data"]}
        assert listed == {"model": None, one.name: "model", other.name: "model"}
        for prompt in (short, long):  # One is read by the router, the other by a reader process.
            for name in ("model", one.name, other.name):
                told = answer(prompt, name).json()
                assert told["model"] == name
                oracle = llama.oracles["" if name == "model" else name]
                verdict = compare(oracle, prompt, told["choices"][0]["token_ids"])
                assert verdict.equal, verdict
        assert post("/v1/unload_lora_adapter", lora_name=one.name).status_code == 200
        until(lambda: answer(short, one.name).status_code == 404, "the router to be told")
        assert answer(long, one.name).status_code == 404
        assert answer(short, other.name).status_code == 200
