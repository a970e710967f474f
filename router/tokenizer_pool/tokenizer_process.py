"""A reader process: a child process of the router that prepares requests with large bodies, one at a time.

`router.tokenizer_pool.tokenizer_pool` starts it as ``python -m router.tokenizer_pool.tokenizer_process FD``, with one
end of a socket pair. A frame, either way, is a head (`HEAD`: kind, whether it is the sender's last, length of the
content in bytes) and its content. The first frame has the model and the configuration (`setup_frame`). Each later one
is a request body of some kind, and is answered by one frame.

The process ends when its socket is closed; when the router dies; when a body takes more than twice
`router.reader_timeout_s` (by SIGALRM, should the router not end the process first); or after an answer, when its memory
stays above `KEEP_BYTES` more than at its start though the heap's free memory was given back.

Memory of large bodies goes back to the system by settings of the C library's heap, which need glibc; with another C
library both functions do nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import resource
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
from msgspec import structs

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import HIDDEN, ModelSpec
from twinpool.contracts.checkpoint.picture_spec import PictureSpec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.router.openai.chat_format import AnswerFormat
from twinpool.router.openai.parse_request import EmbeddingFormat, GenerateRequest, PairFormat, UnknownModel
from twinpool.router.openai.pooled_answers import read_classify, read_rerank, read_score
from twinpool.router.state.prefix_hashes import PAGE_TOKENS, PrefixHashes
from twinpool.router.text.pictures import ImagesWanted, WantedImage
from twinpool.router.text.tokenizer import ModelTokenizer, read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedPrompt, PreparedRequest, TextAnswer

M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt` (glibc, malloc.h): the size in bytes from which an allocation is a mapping of its own."""
LARGE_BYTES = 256 * 1024


def map_large_buffers() -> None:
    """Give each allocation of `LARGE_BYTES` and more a mapping of its own, which ends as soon as it is freed.

    By default glibc raises that size to the largest mapping that was freed, up to 32 MiB. From then on buffers of
    bodies would lie in the heap, where a small allocation behind a freed buffer keeps its memory from the system.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return the heap's free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


HEAD = struct.Struct("<B?Q")
KEEP_BYTES = 48 * 1024**2
"""A reader process whose resident memory has grown by more than this, the answer left out, ends after the answer."""
NICENESS = 10
"""Added to the router's own niceness: a large body takes the processor time that no stream needs."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal that a process gets when its parent has died."""


class FrameKind(IntEnum):
    """The kind of a frame: a request body of an endpoint, the setup, or an answer."""

    COMPLETION = 1
    CHAT = 2
    TOKENIZE = 3
    DETOKENIZE = 4
    MESSAGES = 5
    COUNT_TOKENS = 6
    RESPONSES = 7
    INPUT_TOKENS = 8
    EMBEDDINGS = 9
    SETUP = 10
    TENANT = 11
    """The name of who sent the next frame's body; there is none where nobody needs a key."""
    ADAPTERS = 12
    """The adapters that are served from now on, each as its three texts; none before the first such frame."""
    GENERATE = 13
    SCORE = 14
    RERANK = 15
    CLASSIFY = 17
    FETCHED = 16
    """Images that were fetched for the next frame's body, by URL; there is none where it needs none."""
    PREPARED = 20
    """A `PreparedRequest`."""
    TEXT = 21
    """A `TextAnswer`."""
    REFUSED = 22
    """A `RequestError`."""
    FAILED = 23
    """The text of any other exception."""
    WANTED = 24
    """The images that the body names by URLs, each with its place: it is to be read once more, with them."""


REQUESTS: dict[FrameKind, Callable[[BodyReader, bytes, str], PreparedRequest]] = {
    FrameKind.COMPLETION: BodyReader.completion,
    FrameKind.CHAT: BodyReader.chat,
    FrameKind.MESSAGES: BodyReader.messages,
    FrameKind.RESPONSES: BodyReader.responses,
    FrameKind.EMBEDDINGS: BodyReader.embeddings,
    FrameKind.GENERATE: BodyReader.generate,
    FrameKind.CLASSIFY: lambda reader, raw, tenant: reader.embeddings(raw, tenant, read_classify),
    FrameKind.SCORE: lambda reader, raw, tenant: reader.pairs(read_score, raw, tenant),
    FrameKind.RERANK: lambda reader, raw, tenant: reader.pairs(read_rerank, raw, tenant),
}
"""What reads the bodies of endpoints that generate or embed."""
TEXTS: dict[FrameKind, Callable[[BodyReader, bytes], TextAnswer]] = {
    FrameKind.TOKENIZE: BodyReader.tokenize,
    FrameKind.DETOKENIZE: BodyReader.detokenize,
    FrameKind.COUNT_TOKENS: BodyReader.count_tokens,
    FrameKind.INPUT_TOKENS: BodyReader.input_tokens,
}
"""What answers the bodies of endpoints that count or make tokens."""


# ---------------------------------------------------------------- both ends


def setup_frame(spec: ModelSpec, config: RouterConfig, max_chars: int, page_tokens: int = PAGE_TOKENS) -> bytes:
    """Pack the content of the first frame; `max_chars` bounds a rendered chat prompt. `page_tokens`: of the workers'
    pages."""
    tree = {
        "path": str(spec.path),
        "names": spec.names,
        "vocab_size": spec.vocab_size,
        "context": spec.context,
        "bos": spec.bos_token_id,
        "eos": spec.eos_token_ids,
        "hidden": spec.config.peek(HIDDEN),
        "defaults": spec.generation_defaults,
        "config": dataclasses.asdict(config),
        "max_chars": max_chars,
        "page_tokens": page_tokens,
        "pictures": dataclasses.asdict(spec.pictures) if spec.pictures is not None else None,
    }
    return _pack(tree)


def unpacked_setup(frame: bytes) -> dict[str, Any]:
    """Unpack a `setup_frame`."""
    setup: dict[str, Any] = _unpack(frame)
    return setup


def spec_of(setup: dict[str, Any]) -> ModelSpec:
    """Return the model of a setup frame, with only those fields that reading bodies needs."""
    path, (name, *aliases) = Path(setup["path"]), setup["names"]
    return ModelSpec(
        path=path,
        name=name,
        architecture="",
        vocab_size=setup["vocab_size"],
        layers=0,
        context=setup["context"],
        dtype="",
        bos_token_id=setup["bos"],
        eos_token_ids=setup["eos"],
        fingerprint="",
        generation_defaults=setup["defaults"],
        aliases=tuple(aliases),
        pictures=PictureSpec(**setup["pictures"]) if setup["pictures"] else None,
        config=JsonFields(path, {HIDDEN: setup["hidden"]}),
        headers={},
    )


def prepared_frame(prepared: PreparedRequest) -> bytes:
    """Pack a prepared request without its messages and original prompts, which aren't needed any more."""
    fields = {f.name: getattr(prepared.request, f.name) for f in dataclasses.fields(GenerateRequest)}
    fields |= {"prompts": (), "messages": (), "template_args": {}, "tool_use": None, "eos": sorted(fields["eos"])}
    if (found := prepared.request.answer_format) is not None:
        fields["answer_format"] = dataclasses.asdict(found)
    if (embedding := prepared.request.embedding) is not None:
        fields["embedding"] = dataclasses.asdict(embedding)
    fields["sampling"] = structs.asdict(prepared.request.sampling)
    if (adapter := prepared.request.sampling.adapter) is not None:
        fields["sampling"]["adapter"] = structs.astuple(adapter)
    page_tokens = prepared.prompts[0].hashes.page_tokens
    prompts = [
        (array("I", p.tokens).tobytes(), p.text, p.hashes.raw, list(map(structs.astuple, p.pictures)))
        for p in prepared.prompts
    ]
    return _pack((fields, len(prepared.request.prompts), page_tokens, prompts))


def prepared_of(frame: bytes) -> PreparedRequest:
    """Unpack a `prepared_frame`; `GenerateRequest.prompts` holds as many empty prompts as there were prompts."""
    fields, count, page_tokens, prompts = _unpack(frame)
    sampling = fields["sampling"]
    if sampling["adapter"] is not None:
        sampling["adapter"] = AdapterRef(*sampling["adapter"])
    fields |= {
        "sampling": SamplingParams(**sampling),
        "eos": frozenset(fields["eos"]),
        "prompts": ((),) * count,
    }
    if (found := fields["answer_format"]) is not None:
        fields["answer_format"] = AnswerFormat(**found)
    if (embedding := fields["embedding"]) is not None:
        if embedding["pairs"] is not None:
            embedding["pairs"] = PairFormat(**embedding["pairs"])
        fields["embedding"] = EmbeddingFormat(**embedding)
    return PreparedRequest(
        GenerateRequest(**fields),
        tuple(
            PreparedPrompt(
                _tokens(raw), text, PrefixHashes(keys, page_tokens), tuple(Picture(*each) for each in pictures)
            )
            for raw, text, keys, pictures in prompts
        ),
    )


def adapters_frame(adapters: Iterable[AdapterRef]) -> bytes:
    """Pack the content of an `ADAPTERS` frame."""
    return _pack([structs.astuple(one) for one in adapters])


def fetched_frame(images: Mapping[str, bytes]) -> bytes:
    """Pack the content of a `FETCHED` frame."""
    return _pack(images)


def wanted_of(frame: bytes) -> list[WantedImage]:
    """Unpack the content of a `WANTED` frame."""
    return [WantedImage(*one) for one in _unpack(frame)]


def text_of(frame: bytes) -> TextAnswer:
    """Unpack the frame of a `TextAnswer`."""
    return TextAnswer(*_unpack(frame))


def refusal_frame(error: RequestError) -> bytes:
    """Pack the error of a refused body."""
    return _pack((isinstance(error, UnknownModel), str(error), error.param))


def refusal_of(frame: bytes) -> RequestError:
    """Unpack a `refusal_frame`: an `UnknownModel` or another `RequestError`."""
    unknown, message, param = _unpack(frame)
    return (UnknownModel if unknown else RequestError)(message, param=param)


def _tokens(raw: bytes) -> tuple[int, ...]:
    return tuple(array("I", raw))


def _pack(tree: object) -> bytes:
    return bytes(msgpack.packb(tree, unicode_errors="surrogatepass"))


def _unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, use_list=False, unicode_errors="surrogatepass")


# ---------------------------------------------------------------- the child


def answer(intake: BodyReader, kind: FrameKind, raw: bytes, tenant: str = "") -> tuple[FrameKind, bytes]:
    """Return the answer to one body of `tenant`'s, its kind and content. Every exception becomes an answer, none is
    raised."""
    try:
        if kind in REQUESTS:
            return FrameKind.PREPARED, prepared_frame(REQUESTS[kind](intake, raw, tenant))
        return FrameKind.TEXT, _pack(TEXTS[kind](intake, raw))
    except ImagesWanted as wanted:
        return FrameKind.WANTED, _pack(wanted.images)
    except RequestError as error:
        return FrameKind.REFUSED, refusal_frame(error)
    except MemoryError:
        return FrameKind.REFUSED, refusal_frame(RequestError("the body takes more memory than a reader may have"))
    except Exception as error:  # Our own bug: this body fails, the process goes on.
        return FrameKind.FAILED, f"{type(error).__name__}: {error}".encode("utf-8", "replace")


def serve(channel: socket.socket) -> None:
    """Read the setup and answer frames, until the socket is closed or the process has to end for its memory."""
    frame = _receive(channel)
    if frame is None:
        return
    setup = unpacked_setup(frame[1])
    config = RouterConfig(**setup["config"])
    model_tokenizer: ModelTokenizer = read_model_tokenizer(Path(setup["path"]), setup["max_chars"])
    intake = BodyReader(spec_of(setup), model_tokenizer, config, setup["page_tokens"])
    # Bodies are trees without cycles, and collecting cycles among millions of lists takes longer than parsing them.
    gc.freeze()
    gc.disable()
    at_start = _resident_bytes()
    limit = _mapped_bytes() + config.reader_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    tenant = ""
    while (frame := _receive(channel)) is not None:
        if frame[0] == FrameKind.TENANT:
            tenant = frame[1].decode()
            continue
        if frame[0] == FrameKind.FETCHED:
            intake.sources = dataclasses.replace(intake.sources, fetched=_unpack(frame[1]))
            continue
        if frame[0] == FrameKind.ADAPTERS:
            intake.adapters = {one[0]: AdapterRef(*one) for one in _unpack(frame[1])}
            continue
        signal.setitimer(signal.ITIMER_REAL, 2 * config.reader_timeout_s)
        kind, reply = answer(intake, FrameKind(frame[0]), frame[1], tenant)
        signal.setitimer(signal.ITIMER_REAL, 0)
        tenant = ""
        intake.sources = dataclasses.replace(intake.sources, fetched={})
        del frame
        give_back()
        last = _resident_bytes() - at_start > KEEP_BYTES + len(reply)
        channel.sendall(HEAD.pack(kind, last, len(reply)))
        channel.sendall(reply)
        if last:
            return


def _receive(channel: socket.socket) -> tuple[int, bytes] | None:
    """Return the next frame's kind and content, None at the end. Its length is trusted: the router bounds bodies."""
    head = _exactly(channel, HEAD.size)
    if head is None:
        return None
    kind, _, length = HEAD.unpack(head)
    body = _exactly(channel, length)
    return None if body is None else (kind, bytes(body))


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    data, at = bytearray(size), 0
    with memoryview(data) as view:
        while at < size:
            got = channel.recv_into(view[at:])
            if not got:
                return None
            at += got
    return data


def _mapped_bytes() -> int:
    return _pages()[0] * resource.getpagesize()


def _resident_bytes() -> int:
    return _pages()[1] * resource.getpagesize()


def _pages() -> list[int]:
    """Return this process's number of mapped memory pages, and of resident ones."""
    return list(map(int, Path("/proc/self/statm").read_text().split()[:2]))


def main() -> None:
    # A Ctrl-C in the terminal is for the router, which ends its readers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            serve(channel)
        except OSError:  # the router is gone
            return


if __name__ == "__main__":
    main()
