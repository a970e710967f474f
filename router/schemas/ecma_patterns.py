"""Regular expressions as JSON schemas have them (ECMA-262's), read into regular languages.

What comes after a place is known when the place is read: so an assertion about it, a look-ahead or ``$``, is an
intersection with what follows. Look-behinds, word boundaries, references to groups and assertions within a repetition
are not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from twinpool.router.schemas.regular_terms import ALL, Ranges, RegularTerms, TooMuchWork, union, without

MAX_LENGTH = 512
"""Characters of one pattern that is read."""
MAX_NESTED = 24
"""Groups within each other."""
MAX_REPEATS = 1000
_HARD = re.compile(r"\(\?(?:[=!]|<[=!])|\\c|\[\^?\]|\\[bBzZAG]|\(\?[a-z]|\\u\{|\\[1-9k]")
"""What the engine doesn't read, or reads otherwise."""


class UnreadPattern(ValueError):
    """Raised for a pattern that can't be read, with the reason."""


@dataclass(frozen=True, slots=True)
class _Node:
    kind: str
    """``chars``, ``seq``, ``or``, ``repeat``, ``ahead``, ``not ahead``, ``begin`` or ``end``."""
    parts: tuple[_Node, ...] = ()
    chars: Ranges = ()
    least: int = 0
    most: int = 0


_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
                  (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip
_BREAKS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SETS |= {name.upper(): without(ALL, chars) for name, chars in _SETS.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def is_hard(pattern: str) -> bool:
    """Whether a pattern has what the engine doesn't read as it is meant."""
    return _HARD.search(pattern) is not None


def searched(pattern: str, terms: RegularTerms) -> int:
    """Return the texts in which a pattern is found anywhere, as JSON schema means it. Raises `UnreadPattern`."""
    tree = _read(pattern)
    here = _term(tree, terms.anything, terms, at_start=True)
    later = _term(tree, terms.anything, terms, at_start=False)
    return terms.either((here, terms.seq(terms.chars(ALL), terms.anything, later)))


def _read(pattern: str) -> _Node:
    if len(pattern) > MAX_LENGTH:
        raise TooMuchWork(f"a pattern that is combined with others may have {MAX_LENGTH} characters")
    reader = _Reader(pattern)
    tree = reader.choice()
    if reader.at < len(pattern):
        raise UnreadPattern(f"its pattern has a ) too many at character {reader.at}")
    return tree


# ---------------------------------------------------------------- what a place in a pattern lets follow


def _term(node: _Node, rest: int, terms: RegularTerms, *, at_start: bool) -> int:
    """Return what follows from a node on, where `rest` follows the node. `at_start`: nothing stands before it."""
    match node.kind:
        case "chars":
            return terms.seq(terms.chars(node.chars), rest)
        case "seq":
            starts = [at_start]
            for part in node.parts[:-1]:
                starts.append(starts[-1] and _takes_nothing(part))
            if any(_has(part, "begin") and not first and _may_take_nothing(node.parts[:at])
                   for at, (part, first) in enumerate(zip(node.parts, starts, strict=False)) if at_start):  # fmt: skip
                raise UnreadPattern("its pattern has ^ after what may be absent")
            for part, first in zip(reversed(node.parts), reversed(starts), strict=False):
                rest = _term(part, rest, terms, at_start=first)
            return rest
        case "or":
            return terms.either(_term(part, rest, terms, at_start=at_start) for part in node.parts)
        case "repeat":
            (part,) = node.parts
            if any(_has(part, kind) for kind in ("ahead", "not ahead", "begin", "end")):
                if (node.least, node.most) == (0, 1):
                    return terms.either((rest, _term(part, rest, terms, at_start=at_start)))
                raise UnreadPattern("its pattern repeats an assertion (^, $ or a look-ahead)")
            once = _term(part, terms.empty, terms, at_start=False)
            return terms.seq(terms.repeat(once, node.least, node.most), rest)
        case "begin":
            return rest if at_start else terms.none
        case "end":
            return terms.both((rest, terms.empty))
    ahead = _term(node.parts[0], terms.anything, terms, at_start=at_start)
    return terms.both((rest, ahead if node.kind == "ahead" else terms.other_than(ahead)))


def _has(node: _Node, kind: str) -> bool:
    return node.kind == kind or any(_has(part, kind) for part in node.parts)


def _takes_nothing(node: _Node) -> bool:
    if node.kind in ("begin", "end", "ahead", "not ahead"):
        return True
    return node.kind in ("seq", "or") and all(map(_takes_nothing, node.parts))


def _may_take_nothing(nodes: tuple[_Node, ...]) -> bool:
    return all(map(_may_be_empty, nodes))


def _may_be_empty(node: _Node) -> bool:
    match node.kind:
        case "chars":
            return False
        case "seq":
            return all(map(_may_be_empty, node.parts))
        case "or":
            return any(map(_may_be_empty, node.parts))
        case "repeat":
            return node.least == 0 or _may_be_empty(node.parts[0])
    return True


# ---------------------------------------------------------------- the notation


@dataclass(slots=True)
class _Reader:
    text: str
    at: int = 0
    depth: int = field(default=0)

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise UnreadPattern("its pattern ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _has(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def choice(self) -> _Node:
        parts = [self._sequence()]
        while self._has("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("or", tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else _Node("seq", tuple(parts))

    def _repeated(self, node: _Node) -> _Node:
        times = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}.get(self.text[self.at : self.at + 1])
        if times is not None:
            self.at += 1
        elif (found := re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}").match(self.text, self.at)) is not None:
            self.at = found.end()
            least = int(found[1])
            times = (least, least if found[2] is None else int(found[3]) if found[3] else -1)
        if times is None:
            return node
        self._has("?")  # As few as possible or as many: the same texts.
        least, most = times
        if max(least, most) > MAX_REPEATS:
            raise TooMuchWork(f"a pattern that is combined with others may repeat {MAX_REPEATS} times")
        if 0 <= most < least:
            raise UnreadPattern("its pattern repeats from more to fewer times")
        if self.text[self.at : self.at + 1] in ("*", "+", "?"):
            raise UnreadPattern("its pattern repeats a repetition")
        return _Node("repeat", (node,), (), least, most)

    def _atom(self) -> _Node:
        match char := self._next():
            case "(":
                return self._group()
            case "[":
                return _Node("chars", chars=self._class())
            case ".":
                return _Node("chars", chars=without(ALL, _BREAKS))
            case "^":
                return _Node("begin")
            case "$":
                return _Node("end")
            case "*" | "+" | "?":
                raise UnreadPattern(f"its pattern has a {char} after nothing")
            case "\\":
                return _Node("chars", chars=self._escape())
        return _Node("chars", chars=((ord(char), ord(char)),))

    def _group(self) -> _Node:
        kind = "group"
        if self._has("?"):
            if self._has("="):
                kind = "ahead"
            elif self._has("!"):
                kind = "not ahead"
            elif (named := re.compile(r"<[A-Za-z_$][\w$]*>").match(self.text, self.at)) is not None:
                self.at = named.end()
            elif not self._has(":"):
                look = self.text.startswith("<", self.at)
                raise UnreadPattern(
                    "look-behinds can't be followed" if look else "flags in a pattern can't be followed"
                )
        self.depth += 1
        if self.depth > MAX_NESTED:
            raise TooMuchWork(f"a pattern that is combined with others may nest {MAX_NESTED} groups")
        node = self.choice()
        if not self._has(")"):
            raise UnreadPattern("its pattern lacks a )")
        self.depth -= 1
        return node if kind == "group" else _Node(kind, (node,))

    def _class(self) -> Ranges:
        other = self._has("^")
        found: list[Ranges] = []
        dash = False
        while not self._has("]"):
            char = self._next()
            chars = self._escape(within=True) if char == "\\" else ((ord(char), ord(char)),)
            if dash and found and _single(found[-1]) and _single(chars):
                low, high = found.pop()[0][0], chars[0][0]
                if high < low:
                    raise UnreadPattern("its pattern has a range from a later to an earlier character")
                found.append(((low, high),))
                dash = False
            elif char == "-" and found and not dash and not self.text.startswith("]", self.at):
                dash = True
            else:
                found += [((45, 45),)] if dash else []
                found.append(chars)
                dash = False
        chars = union(*found)
        return without(ALL, chars) if other else chars

    def _escape(self, within: bool = False) -> Ranges:
        char = self._next()
        if char in _SETS:
            return _SETS[char]
        if char in _CONTROLS and not (char == "0" and self.text[self.at : self.at + 1].isdigit()):
            code = _CONTROLS[char]
        elif char == "b" and within:
            code = 8
        elif char in "bB":
            raise UnreadPattern(f"\\{char} can't be followed")
        elif char == "c" and self.text[self.at : self.at + 1].isalpha():
            code = ord(self._next()) % 32
        elif char in "xu":
            code = self._code(char)
        elif char in "pP":
            raise UnreadPattern(f"\\{char} can't be combined with other patterns, or with a look-ahead")
        elif char.isalnum():
            raise UnreadPattern(f"\\{char} can't be followed")
        else:
            code = ord(char)
        return ((code, code),)

    def _code(self, kind: str) -> int:
        digits = re.compile(r"\{([0-9a-fA-F]{1,6})\}" if kind == "u" and self.text.startswith("{", self.at) else
                            r"([0-9a-fA-F]{2})" if kind == "x" else r"([0-9a-fA-F]{4})")  # fmt: skip
        if (found := digits.match(self.text, self.at)) is None:
            raise UnreadPattern(f"its pattern has a \\{kind} without digits")
        self.at = found.end()
        code = int(found[1], 16)
        if 0xD800 <= code <= 0xDBFF and (
            low := re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE).match(self.text, self.at)
        ):
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise UnreadPattern("its pattern has half of a surrogate pair")
        return code


def _single(chars: Ranges) -> bool:
    return len(chars) == 1 and chars[0][0] == chars[0][1]
