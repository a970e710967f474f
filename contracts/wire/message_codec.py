"""Messages to bytes and back: `contracts.message_types` says how they look, this is what encodes and decodes them.

A message is decoded at once. Where that fails and it has tuples marked `SKIP_UNKNOWN`, their entries are decoded one by
one, so that those of kinds that only a newer build knows are left out and the rest of the message is taken. Bytes that
no build of this protocol sends raise `WireError`, with the path of what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder, Encoder

from twinpool.contracts.errors import WireError
from twinpool.contracts.message_types import SKIP_UNKNOWN, Message

T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for bytes that aren't of its type."""


class _Kind(msgspec.Struct, array_like=True):
    """What any message of a union begins with."""

    kind: str


def _plain(value: object) -> object:
    """A number or text of a type of its own, such as NumPy's, as Python's."""
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    return operator.index(value)  # type: ignore[arg-type]


ENCODER = Encoder(enc_hook=_plain)
_KIND = Decoder(_Kind)


def encode(message: Message) -> bytes:
    """Raises `ValueError`, `TypeError` or `OverflowError` for a message that has no bytes."""
    return ENCODER.encode(message)


def decode(of: type[T], data: bytes) -> tuple[T, int]:
    """Decode a message of type `of`, which may be a union of messages; returns it, and the number of entries of its
    tuples that were left out because only a newer build knows their kind. Raises `WireError`."""
    kind: Any = of
    codec: _Codec = _codec(kind)
    try:
        return codec.strict.decode(data), 0
    except UNREADABLE as error:
        if codec.loose is None:
            raise WireError(str(error)) from None
    loose = decoded(codec.loose, data)
    values, left_out = {name: getattr(loose, name) for name in of.__struct_fields__}, 0  # type: ignore[attr-defined]
    for at, name, entry in codec.marked:
        values[name], others = _entries(entry, values[name], f"$[{at}]")
        left_out += others
    return of(**values), left_out


def _entries(entry: Any, raws: Sequence[Raw], where: str) -> tuple[tuple[Any, ...], int]:
    found: list[Any] = []
    left_out = skipped = 0
    for number, raw in enumerate(raws):
        try:
            value, within = decode(entry, bytes(raw))
        except WireError as error:
            if not is_newer(raw, error, _codec(entry).kinds):
                raise WireError(f"{where}[{number}]: {error}") from None
            skipped += 1
        else:
            found.append(value)
            left_out += within
    return tuple(found), left_out + skipped


# ---------------------------------------------------------------- decoders of a type


class _Codec(NamedTuple):
    strict: Decoder[Any]
    loose: Decoder[Any] | None
    """Of the same message with the entries of its marked tuples left as bytes; None where it has none."""
    marked: tuple[tuple[int, str, Any], ...]
    """Place, name and type of entries of each marked tuple."""
    kinds: frozenset[str]
    """The kinds of a union; none of a single type."""


@cache
def _codec(of: Any) -> _Codec:
    members = get_args(of)
    if members:
        return _Codec(Decoder(of), None, (), frozenset(cls.__struct_config__.tag for cls in members))
    hints = get_type_hints(of, include_extras=True)
    shift = of.__struct_config__.tag is not None  # The kind comes first.
    fields: list[Any] = []
    marked = []
    for at, field in enumerate(msgspec.structs.fields(of), shift):
        kind: Any = hints[field.name]
        if get_origin(kind) is Annotated and SKIP_UNKNOWN in kind.__metadata__:
            marked.append((at, field.name, get_args(kind.__origin__)[0]))
            kind = Annotated[(tuple[Raw, ...], *kind.__metadata__)]
        fields.append((field.name, kind, _default(field)))
    if not marked:
        return _Codec(Decoder(of), None, (), frozenset())
    loose = msgspec.defstruct(
        of.__name__, [f if f[2] is not msgspec.NODEFAULT else f[:2] for f in fields], array_like=True
    )
    return _Codec(Decoder(of), Decoder(loose), tuple(marked), frozenset())


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default


def decoded(decoder: Decoder[T], data: bytes | Raw) -> T:
    """Raises `WireError` for bytes that aren't of the decoder's type."""
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(str(error)) from None


def is_newer(raw: bytes | Raw, error: Exception, kinds: Collection[str]) -> bool:
    """Whether a message that can't be decoded, as `error` says, is one that a newer build may send. `kinds`: those of
    its union that this build knows; none where it is of no union."""
    if kinds:
        try:
            if _KIND.decode(raw).kind not in kinds:
                return True
        except UNREADABLE:
            return False
    # `msgspec` has no class of its own for the error of a value that an enum hasn't got.
    return str(error).startswith("Invalid enum value")
