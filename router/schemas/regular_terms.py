"""Regular languages with intersection and complement, which the engine's own regular expressions lack.

A language is a term: a set of characters, a sequence, a choice, a repetition, an intersection or a complement. Its
automaton is made of derivatives (Brzozowski, "Derivatives of regular expressions", 1964): the state after a character
is the term of what may follow it. From an automaton comes the text of a regular expression without intersections and
complements, by removing one state after the other.

Terms are numbers within one `RegularTerms`, equal terms the same number. All work is counted and bounded, as a client's
pattern decides how much there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

Ranges = tuple[tuple[int, int], ...]
"""Characters as ascending ranges of code points, both ends within."""
ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""Every character; halves of surrogate pairs are none."""
MAX_STEPS = 40_000
"""Derivatives of one schema."""
MAX_STATES = 400
"""States of one automaton."""
MAX_WRITTEN = 150
"""States of an automaton that is written as a regular expression."""
MAX_WORD = 64
"""Characters of a text that others are told from."""
MAX_NODES = 20_000
"""Characters of texts that others are told from, those of a common beginning once."""
MAX_TEXT = 1 << 15
"""Characters of one regular expression."""


class TooMuchWork(ValueError):
    """Raised where a language would take more work than one schema may."""


class Term(NamedTuple):
    """One term: what it is made of, and whether the empty text is in it."""

    kind: str
    """``none``, ``empty``, ``chars``, ``seq``, ``or``, ``and``, ``not`` or ``repeat``."""
    parts: tuple[int, ...]
    chars: Ranges
    least: int
    most: int
    nullable: bool


def union(*sets: Ranges) -> Ranges:
    """Return the characters of any of `sets`."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(each for chars in sets for each in chars):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return without(tuple(out), ((0xD800, 0xDFFF),)) if out else ()


def without(chars: Ranges, others: Ranges) -> Ranges:
    """Return the characters of `chars` that aren't in `others`."""
    left = list(chars)
    for low, high in others:
        left = [
            piece
            for a, b in left
            for piece in (((a, min(b, low - 1)), (max(a, high + 1), b)) if a <= high and low <= b else ((a, b),))
            if piece[0] <= piece[1]
        ]
    return tuple(left)


class RegularTerms:
    """The terms of one schema's patterns."""

    def __init__(self) -> None:
        self.steps = 0
        """Derivatives that were computed, and what else takes as long."""
        self._terms: list[Term] = []
        self._known: dict[Term, int] = {}
        self._derived: dict[tuple[int, int], int] = {}
        self._texts: dict[int, str] = {}
        self.none = self._add(Term("none", (), (), 0, 0, False))
        self.empty = self._add(Term("empty", (), (), 0, 0, True))
        self.anything = self.repeat(self.chars(ALL), 0, -1)

    def _add(self, term: Term) -> int:
        found = self._known.setdefault(term, len(self._terms))
        if found == len(self._terms):
            self._terms.append(term)
        return found

    def chars(self, chars: Ranges) -> int:
        return self._add(Term("chars", (), chars, 0, 0, False)) if chars else self.none

    def literal(self, text: str) -> int:
        return self.seq(*(self.chars(((ord(each), ord(each)),)) for each in text))

    def seq(self, *parts: int) -> int:
        flat: list[int] = []
        for part in parts:
            flat += self._terms[part].parts if self._terms[part].kind == "seq" else (part,)
        if self.none in flat:
            return self.none
        flat = [part for part in flat if part != self.empty]
        if len(flat) < 2:
            return flat[0] if flat else self.empty
        return self._add(Term("seq", tuple(flat), (), 0, 0, all(self._terms[part].nullable for part in flat)))

    def either(self, parts: Iterable[int]) -> int:
        flat = self._flat("or", parts) - {self.none}
        everything = self.anything if hasattr(self, "anything") else -1
        if everything in flat:
            return everything
        sets = [part for part in flat if self._terms[part].kind == "chars"]
        if len(sets) > 1:
            flat = (flat - set(sets)) | {self.chars(union(*(self._terms[part].chars for part in sets)))}
        if len(flat) < 2:
            return next(iter(flat), self.none)
        return self._add(Term("or", tuple(sorted(flat)), (), 0, 0, any(self._terms[part].nullable for part in flat)))

    def both(self, parts: Iterable[int]) -> int:
        flat = self._flat("and", parts) - {self.anything}
        if self.none in flat:
            return self.none
        if len(flat) < 2:
            return next(iter(flat), self.anything)
        return self._add(Term("and", tuple(sorted(flat)), (), 0, 0, all(self._terms[part].nullable for part in flat)))

    def _flat(self, kind: str, parts: Iterable[int]) -> set[int]:
        out: set[int] = set()
        for part in parts:
            out |= set(self._terms[part].parts) if self._terms[part].kind == kind else {part}
        return out

    def other_than(self, part: int) -> int:
        """Return the term of all texts that aren't in `part`."""
        term = self._terms[part]
        if term.kind == "not":
            return term.parts[0]
        if part in (self.none, self.anything):
            return self.anything if part == self.none else self.none
        return self._add(Term("not", (part,), (), 0, 0, not term.nullable))

    def repeat(self, part: int, least: int, most: int) -> int:
        """Return `part` from `least` to `most` times; -1 is without end."""
        if most == 0 or part == self.empty:
            return self.empty
        if part == self.none:
            return self.empty if least == 0 else self.none
        if (least, most) == (1, 1):
            return part
        return self._add(Term("repeat", (part,), (), least, most, least == 0 or self._terms[part].nullable))

    # ------------------------------------------------------------ what is in a language

    def matches(self, term: int, text: str) -> bool:
        for each in text:
            term = self._after(term, ord(each))
        return self._terms[term].nullable

    def is_empty(self, term: int) -> bool:
        return not any(self._terms[state].nullable for state in self._automaton(term))

    def _after(self, term: int, char: int) -> int:
        """Return the term of what may follow `char`."""
        known = self._derived.get((term, char))
        if known is not None:
            return known
        kind, parts, chars, least, most, _ = self._terms[term]
        self._count(1 + (len(parts) + len(chars)) // 8)
        if kind == "chars":
            out = self.empty if any(low <= char <= high for low, high in chars) else self.none
        elif kind == "seq":
            ways = []
            for at, part in enumerate(parts):
                ways.append(self.seq(self._after(part, char), *parts[at + 1 :]))
                if not self._terms[part].nullable:
                    break
            out = self.either(ways)
        elif kind == "or":
            out = self.either(self._after(part, char) for part in parts)
        elif kind == "and":
            out = self.both(self._after(part, char) for part in parts)
        elif kind == "not":
            out = self.other_than(self._after(parts[0], char))
        elif kind == "repeat":
            rest = self.repeat(parts[0], max(0, least - 1), most - 1 if most > 0 else -1)
            out = self.seq(self._after(parts[0], char), rest)
        else:
            out = self.none
        self._derived[term, char] = out
        return out

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise TooMuchWork("its patterns take too many steps to combine; make them simpler")

    def _classes(self, term: int) -> list[Ranges]:
        """Return the sets of characters between which `term` makes no difference."""
        bounds, seen, left = {0, 0xD800, 0xE000, 0x110000}, {term}, [term]
        while left:
            found = self._terms[left.pop()]
            for low, high in found.chars:
                bounds |= {low, high + 1}
            new = set(found.parts) - seen
            seen |= new
            left += new
        ordered = sorted(bounds)
        pieces = [(low, high - 1) for low, high in pairwise(ordered) if low != 0xD800]
        told_apart: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        sets = [self._terms[part].chars for part in sorted(seen) if self._terms[part].chars]
        for piece in pieces:
            sign = tuple(any(low <= piece[0] <= high for low, high in chars) for chars in sets)
            told_apart.setdefault(sign, []).append(piece)
        return [tuple(ranges) for ranges in told_apart.values()]

    def _automaton(self, term: int) -> dict[int, list[tuple[Ranges, int]]]:
        """Return the states that `term` leads to, each with its steps."""
        classes = self._classes(term)
        if len(classes) > MAX_STATES:
            raise TooMuchWork("its patterns tell too many characters apart; make them simpler")
        states: dict[int, list[tuple[Ranges, int]]] = {}
        left = [term]
        while left:
            state = left.pop()
            if state in states:
                continue
            if len(states) >= MAX_STATES:
                raise TooMuchWork("its patterns take too many states to combine; make them simpler")
            steps = [(chars, self._after(state, chars[0][0])) for chars in classes]
            states[state] = [(chars, to) for chars, to in steps if to != self.none]
            left += [to for _, to in states[state]]
        return states

    # ------------------------------------------------------------ a language as text

    def text(self, term: int) -> str:
        """Return a regular expression of the whole text, anchored, as the engine reads it.

        Raises `TooMuchWork`, and `ValueError` for a language without texts.
        """
        if term not in self._texts:
            plain = self._plain(term)
            self._texts[term] = f"^(?:{plain if plain is not None else self._text_of_automaton(term)})$"
        return self._texts[term]

    def texts(self, term: int) -> list[str]:
        """Return regular expressions that are all to fit, which are shorter than one for an intersection. Raises as
        `text` does."""
        found = self._terms[term]
        return [self.text(part) for part in (found.parts if found.kind == "and" else (term,))]

    def _plain(self, term: int) -> str | None:
        """The text of a term without intersections and complements; None where it has some, or is long."""
        kind, parts, chars, least, most, _ = self._terms[term]
        if kind == "chars":
            return _class(chars)
        if kind == "empty":
            return ""
        texts = [self._plain(part) for part in parts] if kind in ("seq", "or", "repeat") else []
        known = [text for text in texts if text is not None]
        if not texts or len(known) < len(texts) or sum(map(len, known)) > MAX_TEXT:
            return None
        if kind == "seq":
            return "".join(known)
        if kind == "or":
            return f"(?:{'|'.join(known)})"
        return f"(?:{known[0]}){{{least},{'' if most < 0 else most}}}"

    def _text_of_automaton(self, term: int) -> str:
        found = self._automaton(term)
        if len(found) > MAX_WRITTEN:
            raise TooMuchWork("its patterns take too many states to combine; make them simpler")
        self._count(len(found) ** 2 // 2)  # About what it takes to take the states away.
        states = self._merged(found, term)
        alive = _alive(states, {state for state in states if self._terms[state].nullable})
        if term not in alive:
            raise ValueError("no text fits its patterns")
        begin, end = -1, -2
        edges: dict[int, dict[int, str]] = {begin: {term: ""}}
        for state in alive:
            chars: dict[int, list[Ranges]] = {}
            for step, to in states[state]:
                if to in alive:
                    chars.setdefault(to, []).append(step)
            edges[state] = {to: _class(union(*steps)) for to, steps in chars.items()}
            if self._terms[state].nullable:
                edges[state][end] = ""
        return _without_states(edges, begin, end)

    def _merged(self, states: dict[int, list[tuple[Ranges, int]]], first: int) -> dict[int, list[tuple[Ranges, int]]]:
        """Return an automaton in which states after which the same may follow are one (Moore's way)."""
        block = {state: int(self._terms[state].nullable) for state in states}
        count = 0
        while len(set(block.values())) != count:
            count = len(set(block.values()))
            signs = {
                state: (block[state], frozenset((chars, block[to]) for chars, to in steps))
                for state, steps in states.items()
            }
            numbers = {sign: number for number, sign in enumerate(dict.fromkeys(signs.values()))}
            block = {state: numbers[sign] for state, sign in signs.items()}
        named: dict[int, int] = {block[first]: first}
        for state in states:
            named.setdefault(block[state], state)
        return {state: [(chars, named[block[to]]) for chars, to in states[state]] for state in named.values()}


def text_of_others(words: Iterable[str]) -> str:
    """Return a regular expression, anchored, of all texts that are none of `words`. It is as long as they are together.

    Raises `TooMuchWork` where one of them is longer than `MAX_WORD`.
    """
    root: dict[str, Any] = {}
    nodes = 0
    for word in words:
        if len(word) > MAX_WORD:
            raise TooMuchWork(f"a text that is left out may have {MAX_WORD} characters")
        node = root
        for char in word:
            nodes += char not in node
            node = node.setdefault(char, {})
        if nodes > MAX_NODES:
            raise TooMuchWork(f"texts that are left out may have {MAX_NODES} characters together; have fewer")
        node[""] = {}
    return f"^{_others(root)}$"


def _others(node: dict[str, Any]) -> str:
    """The texts that don't lead from a node of a tree of words to the end of one."""
    chars = [char for char in node if char]
    other = without(ALL, union(*(((ord(char), ord(char)),) for char in chars)) if chars else ())
    ways = [f"{_class(other)}(?s:.)*", *(f"{_char(ord(char))}{_others(node[char])}" for char in chars)]
    return f"(?:{'|'.join(ways)}){'' if '' in node else '?'}"


def _alive(states: dict[int, list[tuple[Ranges, int]]], ends: set[int]) -> set[int]:
    """The states from which an end is reached."""
    before: dict[int, set[int]] = {}
    for state, steps in states.items():
        for _, to in steps:
            before.setdefault(to, set()).add(state)
    alive, left = set(ends), list(ends)
    while left:
        new = before.get(left.pop(), set()) - alive
        alive |= new
        left += new
    return alive


def _without_states(edges: dict[int, dict[int, str]], begin: int, end: int) -> str:
    """Return the text from `begin` to `end`, having taken away the states between, those first that cost least."""
    into: dict[int, set[int]] = {state: set() for state in (*edges, end)}
    for source, out in edges.items():
        for to in out:
            into[to].add(source)
    left = set(edges) - {begin}
    while left:
        state = min(left, key=lambda each: (_cost(edges, into, each), each))
        left.discard(state)
        steps = edges.pop(state)
        around = f"(?:{steps.pop(state)})*" if state in steps else ""
        for to in steps:
            into[to].discard(state)
        for source in into.pop(state) - {state}:
            before = edges[source].pop(state)
            for to, after in steps.items():
                _add_edge(edges[source], to, f"{before}{around}{after}")
                into[to].add(source)
    return edges[begin][end]


def _cost(edges: dict[int, dict[int, str]], into: dict[int, set[int]], state: int) -> int:
    """About how much text taking `state` away adds."""
    around = len(edges[state].get(state, ""))
    before = [len(edges[source][state]) for source in into[state] if source != state]
    after = [len(text) for to, text in edges[state].items() if to != state]
    return sum(before) * len(after) + (sum(after) + around * len(after)) * len(before)


def _add_edge(out: dict[int, str], to: int, through: str) -> None:
    known = out.get(to)
    if known is None:
        out[to] = through
    elif known != through:
        out[to] = f"(?:{known}|{through})"
    if len(out[to]) > MAX_TEXT:
        raise TooMuchWork("its patterns are too long once they are combined; make them simpler")


def _class(chars: Ranges) -> str:
    if chars == ALL:
        return "(?s:.)"
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return _char(chars[0][0])
    ranges = (_char(low) + (f"-{_char(high)}" if high > low else "") for low, high in chars)
    return f"[{''.join(ranges)}]"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"
