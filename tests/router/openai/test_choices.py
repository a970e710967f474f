"""Many choices of one long prompt share what they have in common: in the core, on the wire, and in the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.fake_worker import expected
from tests.router.http_server import Server
from tests.router.stage import Stage
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.kv_indexer import prefix_indexes
from twinpool.router.kv_indexer.prefix_indexes import SentPrefixes
from twinpool.router.openai import response_stream
from twinpool.router.openai import response_writer as answers
from twinpool.router.state.prefix_hashes import PrefixHashes, prefix_hashes

PROMPT = tuple(300 + i % 500 for i in range(1500))
BODY: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 3, "seed": 1, "return_token_ids": True}


def want(choice: int) -> list[int]:
    return expected(PROMPT, SamplingParams(3, seed=1, choice=choice))


@pytest.fixture
def dumped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the long lists and texts that were turned into JSON for answers."""
    lengths: list[int] = []
    dumps = answers.compact_json  # type: ignore[attr-defined]

    def counting(tree: Any) -> str:
        if isinstance(tree, tuple | str) and len(tree) > 1000:
            lengths.append(len(tree))
        return str(dumps(tree))

    monkeypatch.setattr(answers, "compact_json", counting)
    return lengths


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_all_choices_tell_of_their_prompt_and_it_is_written_once(
    server: Server, dumped: list[int], path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_stream, "WRITE_BYTES", 3000)
    body = {**BODY, "n": 5, "stream": stream}
    prompt = list(PROMPT)
    if path.endswith("chat/completions"):
        messages = [{"role": "user", "content": "word " * 1200}]
        body = {**body, "messages": messages}
        del body["prompt"]
        text = server.service.model_tokenizer.render(messages, True, {})
        prompt = list(server.service.model_tokenizer.encode(text, add_special=False))
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    wanted = [expected(prompt, SamplingParams(3, seed=1, choice=i)) for i in range(5)]
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        firsts = [e["choices"][0] for e in events if "prompt_token_ids" in e["choices"][0]]
        assert sorted(c["index"] for c in firsts) == list(range(5))
        got: dict[int, list[int]] = {i: [] for i in range(5)}
        for event in events:
            got[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
        assert list(got.values()) == wanted
    else:
        firsts = response.json()["choices"]
        assert [c["token_ids"] for c in firsts] == wanted
    assert all(c["prompt_token_ids"] == prompt for c in firsts)
    assert dumped == [len(prompt)]


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_is_written_once_for_all_choices(server: Server, dumped: list[int], stream: bool) -> None:
    text = 'a "quoted" \\ line\n' * 100
    body = {"prompt": text, "max_tokens": 2, "n": 4, "echo": True, "seed": 1, "stream": stream}
    response = server.post("/v1/completions", body)
    if stream:
        texts = [""] * 4
        for line in response.text.split("\n\n"):
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
    else:
        texts = [c["text"] for c in response.json()["choices"]]
    prompt = server.service.model_tokenizer.encode(text, add_special=True)
    wanted = [expected(prompt, SamplingParams(2, seed=1, choice=i)) for i in range(4)]
    assert texts == [text + server.service.model_tokenizer.decode(tokens) for tokens in wanted]
    assert dumped == [len(text)]


def test_choices_share_one_list_of_tokens_down_to_the_workers(server: Server) -> None:
    server.complete(**{**BODY, "n": 6})
    sent = [s for worker in server.cluster.workers.values() for s in worker.submits]
    assert len(sent) == 12
    assert len({id(s.tokens) for s in sent}) == 1


def test_choices_look_for_their_prefix_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    find = SentPrefixes.find

    def counted(self: SentPrefixes, hashes: PrefixHashes) -> Any:
        looked.append(len(hashes.blocks))
        return find(self, hashes)

    monkeypatch.setattr(SentPrefixes, "find", counted)
    monkeypatch.setattr(prefix_indexes, "KEEP_S", 60.0)  # A busy machine may take longer than that between two choices.
    server.complete(prompt=list(PROMPT)[:300], max_tokens=2, n=8)  # As many as are placed in one turn.
    assert looked == [4]


def test_what_was_looked_up_for_one_choice_knows_where_the_others_went() -> None:
    stage = Stage()
    hashes, indexes, now = prefix_hashes(PROMPT), stage.core.indexes, stage.clock.now()
    first, second = stage.key("prefill-0"), stage.key("prefill-1")
    assert indexes.hits(hashes, now).held == {}
    indexes.sent(first, hashes, now)
    whole = len(PROMPT) // 64 * 64
    assert indexes.hits(hashes, now).held == {first: whole}
    indexes.sent(second, hashes, now)
    assert indexes.hits(hashes, now).device == {first: whole, second: whole}
    assert indexes.hits(prefix_hashes(PROMPT), now).held == {first: whole, second: whole}, (
        "and the memory says the same"
    )
