"""Answers that follow a grammar: the tokens of an oracle that knows nothing of masks, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tests.support.checkpoints import EOS, Oracle, make_checkpoint
from tests.support.worker_pair import SESSION, Answer, Pair, pair
from tests.support.worker_parts import gate_of
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.kept_answers import Detach
from twinpool.contracts.sampling_params import SamplingParams

PATTERNS = (
    r"(yes|no|maybe)",
    r"[a-c]{3,9}-[0-9]{2,4}",
    r"[0-9]{1,12}(\.[0-9]{1,3})?",
    r"(ab|ba)*c",
    r'\{"name": "[a-z]{2,8}", "age": [0-9]{1,3}\}',
    r"(ü|é|ß){2,6}!",
)
MAX = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured") / "model", "qwen3", seed=61)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


class Expected:
    """Greedy answers: of the tokens after which the text can still become a match, the likeliest; the end, where it is
    one. By a regular expression engine that matches partly."""

    def __init__(self, folder: Path, oracle: Oracle) -> None:
        self._oracle = oracle
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._vocabulary = [bytes_of(tokenizer, token) for token in range(tokenizer.get_vocab_size())]

    def answer(self, prompt: list[int], pattern: str, most: int = MAX) -> list[int]:
        text, tokens = b"", list[int]()
        while len(tokens) < most:
            logits = self._oracle.logits([*prompt, *tokens])[-1]
            token = next(t for t in logits.argsort(descending=True).tolist() if self._may_follow(text, t, pattern))
            tokens.append(token)
            if token == EOS:
                break
            text += self._vocabulary[token]
        return tokens

    def _may_follow(self, text: bytes, token: int, pattern: str) -> bool:
        if token == EOS:
            return begins(text, pattern, whole=True)
        more = self._vocabulary[token] if token < len(self._vocabulary) else b""
        return bool(more) and begins(text + more, pattern)


def begins(text: bytes, pattern: str, *, whole: bool = False) -> bool:
    """Whether some text that begins so matches; `whole`: whether this one does. A last character may be cut."""
    for cut in range(4):
        try:
            said = text[: len(text) - cut].decode()
        except UnicodeDecodeError:
            continue
        if not cut:
            return regex.fullmatch(pattern, said, partial=not whole) is not None
        rest = text[len(text) - cut :]
        ends = (said + c for c in "üéß" if c.encode().startswith(rest))
        return not whole and any(regex.fullmatch(pattern, end, partial=True) for end in ends)
    return False


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a byte-level token; empty for a special one."""
    from twinpool.router.text.tokenizer import _BYTE_OF

    piece = tokenizer.id_to_token(token)
    return bytes(_BYTE_OF[c] for c in piece) if piece and all(c in _BYTE_OF for c in piece) and token != EOS else b""


@pytest.fixture(scope="module")
def expected(folder: Path, oracle: Oracle) -> Expected:
    return Expected(folder, oracle)


def sampling(pattern: str, **more: Any) -> SamplingParams:
    grammar = LLMatcher.grammar_from_regex(pattern)
    return SamplingParams(
        **{"max_tokens": MAX, "temperature": 0.0, "stop_token_ids": (EOS,), "grammar": grammar, **more}
    )


def prompts(count: int) -> list[list[int]]:
    return [[(7 * n + 11 * i * i) % 250 for i in range(5 + 9 * n)] for n in range(count)]


def check(both: Pair, expected: Expected, **more: Any) -> list[Answer]:
    asked = list(zip(prompts(len(PATTERNS)), PATTERNS, strict=True))
    answers = both.run(*[both.submit(prompt, sampling(pattern, **more)) for prompt, pattern in asked])
    for (prompt, pattern), answer in zip(asked, answers, strict=True):
        assert answer.list == expected.answer(prompt, pattern), pattern
        assert answer.done is not None
        assert answer.done.reason == ("stop" if answer.list[-1] == EOS else "length")
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [CpuDevice, AsyncCpuDevice, lambda: AdversarialDevice(7)], ids=["cpu", "threads", "late"]
)
@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_d5_answers_are_the_oracles_of_all_tokens_that_can_still_become_a_match(
    folder: Path, expected: Expected, speculation: str, device: Callable[[], Device]
) -> None:
    devices = {role: device() for role in Role}
    with pair(folder, devices=devices, decode={"speculation": speculation}) as both:
        answers = check(both, expected)
        assert sum(a.list[-1] == EOS for a in answers) >= 3, "most of them end by themselves"
        drafted = both.decode.status().counters["tokens_drafted"]
        assert (drafted > 0) is (speculation == "auto"), "what a grammar forces is drafted"


@pytest.mark.slow
def test_a_grammar_outranks_what_would_keep_an_answer_open_or_bring_back_a_token(
    folder: Path, expected: Expected
) -> None:
    with pair(folder) as both:
        pattern, prompt = PATTERNS[0], prompts(1)[0]
        biased = sampling(pattern, min_tokens=20, logit_bias=((ord("z"), 100.0),))
        (answer,) = both.run(both.submit(prompt, biased))
        assert answer.list == expected.answer(prompt, pattern)
        assert answer.list[-1] == EOS


@pytest.mark.slow
def test_d5_an_answer_goes_on_in_its_grammar_after_retraction_and_from_its_tokens(
    folder: Path, expected: Expected
) -> None:
    # By itself decode computes again what it measures to be dearer to copy, and a router would bring it back.
    sections: dict[str, Any] = {"decode": {"retract": "copy"}, "cache": {"host_bytes": 1 << 20}}
    with pair(folder, tokens=1024, faults={"retract_every": 3}, **sections) as both:
        check(both, expected)
        assert both.decode.status().counters["retractions"] > 3
    with pair(folder) as both:
        for prompt, pattern in zip(prompts(3), PATTERNS, strict=False):
            want = expected.answer(prompt, pattern)
            for known in range(1, len(want) - 1):
                request = both.submit(prompt, sampling(pattern), emitted=want[:known])
                assert both.run(request)[0].list == want[known:]


@pytest.mark.slow
def test_a_mask_that_is_missing_at_either_worker_shows(
    folder: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle's answers differ from those without a grammar at the first token and at later ones."""
    with pair(folder) as both:
        (prompt,) = prompts(1)
        free = both.run(both.submit(prompt, SamplingParams(4, temperature=0.0)))[0].list
        want = expected.answer(prompt, PATTERNS[4], 4)
        assert free[0] != want[0]
        assert free[1:] != want[1:]


@pytest.fixture
def refused(folder: Path) -> Iterator[Pair]:
    with pair(folder) as both:
        yield both


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("no grammar at all", "grammar"),
        (LLMatcher.grammar_from_regex("(a"), "regex"),
        (LLMatcher.grammar_from_json_schema('{"not": {}}'), "not"),
    ],
)
def test_a_grammar_that_cant_be_compiled_is_refused_by_both_and_hurts_nobody(
    refused: Pair, grammar: str, why: str
) -> None:
    params = SamplingParams(4, temperature=0.0, stop_token_ids=(EOS,))
    good = refused.submit([1, 2, 3], params)
    bad = SamplingParams(4, temperature=0.0, stop_token_ids=(EOS,), grammar=grammar)
    for leg in (Role.PREFILL, Role.DECODE):
        (answer,) = refused.run(refused.submit([1, 2, 3, 4], bad, legs=(leg,)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.GRAMMAR
        assert why in (answer.done.message or "")
    assert len(refused.run(good)[0].list) == 4


def test_a_request_that_waits_for_its_grammar_can_be_cancelled_and_lost(refused: Pair) -> None:
    worker = refused.decode
    request = refused.submit([1, 2, 3, 4], sampling(PATTERNS[1]))
    refused.cancel(request)
    assert not gate_of(worker)
    refused.submit([1, 2, 3, 4], sampling(PATTERNS[1]))
    assert len(gate_of(worker)) == 1
    worker.drop_session(SESSION)
    refused.prefill.drop_session(SESSION)
    assert not gate_of(worker)
    request = refused.submit([1, 2, 3, 4], sampling(PATTERNS[1]), legs=(Role.DECODE,))
    other = refused.submit([1, 2, 3, 4], sampling(PATTERNS[2]), legs=(Role.DECODE,))
    worker.handle(SESSION, Detach(request, 0))
    assert len(gate_of(worker)) == 1, "its client is gone, and nobody computes it for nobody"
    worker.handle(SESSION, Detach(other, 0))
    assert not gate_of(worker)
