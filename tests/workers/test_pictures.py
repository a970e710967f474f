"""Prompts with pictures on both workers: tokens are those of transformers' whole model, which is given the same files,
and two prompts that differ in a picture alone share nothing of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from tests.support.rank_followers import rank_processes
from tests.support.seeing_models import SEEN, WRITERS, SeeingOracle, asks, pattern, png
from tests.support.stepped_cluster import company, generated
from tests.support.worker_pair import Answer, Pair, pair
from tests.support.worker_parts import table_of
from twinpool.colocate.worker import ColocatedWorker
from twinpool.contracts.block_hash import PICTURE_KEYS, in_vocabulary
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.text.tokenizer import read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedPrompt

COUNT = 8
Messages = Sequence[dict[str, Any]]


class Seer:
    """A model that sees, transformers' answers with it, and prompts as the router makes them."""

    def __init__(self, folder: Path, family: str, **options: Any) -> None:
        self.folder = WRITERS[family](folder, **options)
        self.oracle = SeeingOracle(self.folder)
        spec = read_model_spec(self.folder)
        assert spec.pictures is not None, spec.warnings
        assert spec.architecture == SEEN[family]
        self.token, self.whole = spec.pictures.token, spec.pictures.whole
        self._reader = BodyReader(spec, read_model_tokenizer(self.folder, 100_000), RouterConfig())

    def prompt(self, messages: Messages) -> PreparedPrompt:
        return self._reader.chat(json.dumps({"messages": messages}).encode()).prompts[0]

    def submit(self, both: Pair, messages: Messages, **options: Any) -> RequestId:
        prompt = self.prompt(messages)
        sampling = SamplingParams(COUNT, temperature=0.0, **options)
        return both.submit(prompt.tokens, sampling, pictures=prompt.pictures)

    def expect(self, messages: Messages, answer: Answer, **options: Any) -> None:
        tokens, wanted = self.oracle.generate(messages, COUNT, **options)
        assert in_vocabulary(self.prompt(messages).tokens, self.token) == tokens
        assert answer.list == wanted


@pytest.fixture(scope="module", params=WRITERS)
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer(tmp_path_factory.mktemp("seer") / request.param, request.param)


def palette(height: int, width: int) -> Image.Image:
    return Image.fromarray(pattern(height, width)).quantize(17)


def with_alpha() -> Image.Image:
    alpha = np.arange(31 * 17, dtype=np.int64).reshape(31, 17, 1) % 256
    return Image.fromarray(np.concatenate((pattern(31, 17, seed=3), alpha.astype(np.uint8)), axis=-1), "RGBA")


def turned() -> bytes:
    """A JPEG that a camera held on its side."""
    image = Image.fromarray(pattern(24, 56))
    exif = image.getexif()
    exif[0x0112] = 6
    return png(image, "JPEG", exif=exif)


def moving() -> bytes:
    frames = [palette(20, 20), palette(20, 20).rotate(90)]
    return png(frames[0], "GIF", save_all=True, append_images=frames[1:])


FILES: dict[str, bytes] = {
    "odd": png(pattern(31, 17)),
    "two positions": png(pattern(1, 9)),
    "tall": png(pattern(200, 9)),
    "wide": png(pattern(7, 63)),
    "large": png(pattern(150, 90)),
    "grey": png(Image.fromarray(pattern(40, 24)[..., 0])),
    "sixteen bits": png(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)),
    "palette": png(palette(33, 40)),
    "alpha": png(with_alpha()),
    "webp": png(pattern(48, 20), "WEBP", lossless=True),
    "turned": turned(),
    "moving": moving(),
    "four colours of print": png(Image.fromarray(pattern(16, 40)).convert("CMYK"), "JPEG"),
}


@pytest.mark.slow
def test_pictures_of_every_kind_get_the_oracles_answers(seer: Seer) -> None:
    chats = {name: [asks("see ", data, " it")] for name, data in FILES.items()}
    with pair(seer.folder) as both:
        requests = [seer.submit(both, messages) for messages in chats.values()]
        both.run(*requests)
        found = [both.answers[request].list for request in requests]
    wanted = [seer.oracle.generate(messages, COUNT)[1] for messages in chats.values()]
    assert dict(zip(chats, found, strict=True)) == dict(zip(chats, wanted, strict=True))
    assert len({tuple(answer) for answer in wanted}) >= len(wanted) - 3, "each picture matters"


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_chunks_that_end_within_pictures_change_nothing(seer: Seer, plane: str) -> None:
    messages = [
        asks("first ", png(pattern(60, 60)), " then ", png(pattern(40, 64, seed=1))),
        {"role": "assistant", "content": "there was"},
        asks("later ", png(pattern(33, 21, seed=2)), "?", png(pattern(1, 1)), "!"),
    ]
    sections: dict[str, Any] = {"transfer": {"plane": plane}, "prefill": {"chunk_tokens": 16}}
    with pair(seer.folder, cache={"page_tokens": 16}, **sections) as both:
        (answer,) = both.run(seer.submit(both, messages))
        seer.expect(messages, answer)
        # A picture is computed once, however many chunks it lies in.
        assert both.prefill.status().counters["pictures_computed"] == 4
        # But where its positions see each other: then it lies in one, though a chunk has no more tokens than it has.
        assert (both.prefill.status().counters["pictures_reused"] == 0) == seer.whole


@pytest.mark.slow
def test_a_large_picture_is_progress_and_others_get_on_meanwhile(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower that takes an hour is no hang, and what it computes in slices has the bits of the whole."""
    monkeypatch.setattr("twinpool.engine.layers.picture_tower._SLICE", 1)
    monkeypatch.setattr("twinpool.engine.layers.picture_tower._QUERIES", 4)
    messages, words = [asks("see ", png(pattern(60, 60)), " it")], [asks("say")]
    with pair(seer.folder, prefill={"picture_step_s": 1e-9}) as both:
        seeing, said = seer.submit(both, messages), seer.submit(both, words)
        steps = [both.prefill.status().steps]
        while both.answers[said].done is None:
            both.step()
            steps.append(both.prefill.status().steps)
        assert both.prefill.status().counters["pictures_computed"] == 0
        assert all(before < after for before, after in pairwise(steps))
        (answer,) = both.run(seeing)
        seer.expect(words, both.answers[said])
        seer.expect(messages, answer)


@pytest.mark.slow
def test_the_same_picture_is_shared_and_another_of_its_size_is_not(seer: Seer) -> None:
    def chat(seed: int, question: str) -> Messages:
        return [asks("see ", png(pattern(60, 60, seed)), question)]

    with pair(seer.folder, cache={"page_tokens": 16}) as both:

        def cached(messages: Messages) -> int:
            (answer,) = both.run(seer.submit(both, messages))
            seer.expect(messages, answer)
            return answer.progress[Role.PREFILL].cached_tokens

        assert cached(chat(1, " and say")) == 0
        # All whole pages, the picture's with them; of Gemma's the one that ends within the picture.
        assert cached(chat(1, " or not")) == (16 if seer.whole else 64)
        assert both.prefill.status().counters["pictures_computed"] == 1
        assert cached(chat(2, " and say")) == 0
        assert both.prefill.status().counters["pictures_computed"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seer", ["qwen3.5"], indirect=True)
def test_a_recurrent_state_behind_a_picture_is_of_that_picture(seer: Seer) -> None:
    """A snapshot holds all that was before it, so it has to be found by that alone: the picture lies before it, whole,
    and nothing behind the picture tells one from the other."""

    def chat(seed: int, question: str) -> Messages:
        return [asks("see ", png(pattern(24, 24, seed)), " and say what there is to be seen", question)]

    with pair(seer.folder, cache={"page_tokens": 16}, prefill={"chunk_tokens": 32}) as both:

        def cached(messages: Messages) -> int:
            (answer,) = both.run(seer.submit(both, messages))
            seer.expect(messages, answer)
            return answer.progress[Role.PREFILL].cached_tokens

        pictured = [at for at, one in enumerate(seer.prompt(chat(1, "?")).tokens) if one >= PICTURE_KEYS]
        assert cached(chat(1, "?")) == 0
        assert cached(chat(2, "?")) == 0
        assert cached(chat(1, "!")) == 32 > pictured[-1]
        assert cached(chat(2, "!")) == 32
        assert both.prefill.status().counters["pictures_computed"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "ahead"])
def test_pictures_of_small_and_large_models_of_gemma_4_get_the_oracles_answers(tmp_path: Path, kind: str) -> None:
    """Small ones have inputs by layer, of which a picture's positions have those of padding; in large ones positions of
    a picture see each other, in layers with a window alone."""
    seer = Seer(tmp_path / "seer", "gemma4", **{kind: True})
    chats = [
        [asks("see ", png(pattern(60, 60)), " and ", png(pattern(16, 63, seed=1)), " then")],
        [asks("see ", png(pattern(60, 60)), " or not"), asks("it was ", png(pattern(200, 9, seed=2)))],
    ]
    decode = {"retract": "copy", "cache": {"host_bytes": 1 << 23}}
    sections: dict[str, Any] = {"prefill": {"chunk_tokens": 96}, "decode": decode, "faults": {"retract_every": 3}}
    with pair(seer.folder, cache={"page_tokens": 16}, **sections) as both:
        for messages in chats:
            (answer,) = both.run(seer.submit(both, messages))
            seer.expect(messages, answer)
        assert both.prefill.status().counters["pictures_computed"] == 3
        assert both.decode.status().counters["retractions"] > 0


@pytest.mark.slow
def test_pictures_survive_retraction_and_choices_scores_and_penalties_work_beside_them(seer: Seer) -> None:
    messages = [asks("see ", png(pattern(60, 40)), " it, it, it")]
    decode = {"retract": "copy", "cache": {"host_bytes": 1 << 23}}
    with pair(seer.folder, decode=decode, faults={"retract_every": 2}) as both:
        requests = [seer.submit(both, messages, choice=number, logprobs=2) for number in range(2)]
        requests.append(seer.submit(both, messages, repetition_penalty=0.3))
        *answers, penalised = both.run(*requests)
        assert both.decode.status().counters["retractions"] > 0
        for answer in answers:
            seer.expect(messages, answer)
            assert len(answer.logprobs) == COUNT
        seer.expect(messages, penalised, repetition_penalty=0.3)
        assert penalised.list != answers[0].list


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("what", ["decode dies", "prefill dies", "drained", "colocated"])
def test_an_answer_goes_on_elsewhere_with_its_pictures(seer: Seer, what: str) -> None:
    messages = [asks("see ", png(pattern(60, 40)), " it")]
    prompt = seer.prompt(messages)
    colocated = 2 if what == "colocated" else 0
    # A prefill worker that is gone here has this process, which lives: what it was promised stays in quarantine.
    settle = what != "prefill dies"
    with company(seer.folder, prefills=2, colocated=colocated, settle=settle, prefill={"chunk_tokens": 16}) as c:
        rid = c.submit(prompt.tokens, SamplingParams(COUNT, temperature=0.0), pictures=prompt.pictures)
        if what == "prefill dies":
            c.step()
            c.gone(next(name for name in c.told[rid].request.workers.values() if name.startswith("prefill")))
        else:
            c.until(generated(c, rid, 3), "three tokens")
            if what == "drained":
                c.drain(c.worker_of(rid))
            else:
                c.gone(c.worker_of(rid))
        (answer,) = c.run(rid)
        assert len(c.told[rid].replays) == (what != "drained")
        assert c.told[rid].request.migrations == (what == "drained")
    assert answer == seer.oracle.generate(messages, COUNT)[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["tp", "pp"])
def test_decode_on_two_ranks_goes_on_behind_pictures(seer: Seer, ranks: str) -> None:
    """The other rank sees none of them, and has to turn positions as the first one does."""
    messages = [asks("see ", png(pattern(60, 40)), " it, and ", png(pattern(16, 63)), " too")]
    with (
        rank_processes() as warm,
        pair(seer.folder, ranks=warm, decode={ranks: 2}, transfer={"plane": "shm"}) as both,
    ):
        (answer,) = both.run(seer.submit(both, messages))
        seer.expect(messages, answer)


@pytest.mark.slow
def test_a_request_that_runs_where_its_prompt_was_computed_holds_no_pixels(seer: Seer) -> None:
    """An answer may take an hour, and its pixels 48 MiB."""
    messages = [asks("see ", png(pattern(60, 40)), " it")]
    prompt = seer.prompt(messages)
    with company(seer.folder, colocated=1) as c:
        rid = c.submit(prompt.tokens, SamplingParams(COUNT, temperature=0.0), pictures=prompt.pictures)
        c.until(generated(c, rid, 3), "three tokens")
        (worker,) = c.workers.values()
        assert isinstance(worker, ColocatedWorker)
        (running,) = table_of(worker)
        assert [(one.count, one.pixels) for one in running.submit.pictures] == [(prompt.pictures[0].count, b"")]
        (answer,) = c.run(rid)
    assert answer == seer.oracle.generate(messages, COUNT)[1]


@pytest.mark.slow
def test_pixels_that_a_worker_holds_have_a_bound_and_come_back(seer: Seer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many routers send it some."""
    prompt, alone = seer.prompt([asks("see ", png(pattern(24, 24)))]), SamplingParams(1, temperature=0.0)
    monkeypatch.setattr("twinpool.prefill.request.PIXEL_BYTES", 2 * len(prompt.pictures[0].pixels))
    with pair(seer.folder) as both:
        answers = both.run(*[both.submit(prompt.tokens, alone, pictures=prompt.pictures) for _ in range(3)])
        assert [answer.done.error for answer in answers if answer.done] == [None, None, ErrorKind.OVERLOADED]
        (again,) = both.run(both.submit(prompt.tokens, alone, pictures=prompt.pictures))
        assert again.list == answers[0].list


@pytest.mark.slow
def test_a_picture_that_is_not_the_prompts_is_refused(seer: Seer) -> None:
    prompt = seer.prompt([asks("see ", png(pattern(24, 24)))])
    other = seer.prompt([asks("see ", png(pattern(24, 24, seed=1)))]).pictures
    (mine,) = prompt.pictures
    wrong = {
        "another": other,
        "cut": (structs.replace(mine, pixels=mine.pixels[:-1]),),
        "narrow": (structs.replace(mine, width=16),),
        "none": (structs.replace(mine, height=0, count=0, pixels=b""),),
        "twice": (mine, mine),
    }
    with pair(seer.folder) as both:
        for name, pictures in wrong.items():
            request = both.submit(prompt.tokens, SamplingParams(1), pictures=pictures)
            (answer,) = both.run(request)
            assert answer.done is not None
            assert answer.done.error is ErrorKind.INVALID, name
