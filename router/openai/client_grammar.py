"""A client's grammar as the engine takes it: GBNF made into Lark's notation, and the schemas in it written again.

The engine reads what follows ``%json`` itself, so that each such schema is checked and rewritten as those of other
fields are. That ``%json`` stands nowhere else is made sure of: within texts and regular expressions its first character
is written by its code, so that whatever the engine takes for a schema is one that was read here. An error of the
engine's is told with its line and column in what the client sent.

A grammar is compiled before its request goes to a worker, as workers will compile it (`check_grammar`).

**Marks** become the tokens that they are in a checkpoint's vocabulary (`with_special_marks`). Grammars of calls are
made and checked with marks as text. A mark that is a token (`contracts.grammar.is_mark`) is no text to llguidance,
which knows it by its id: ``<[200005]>``.

**Endless grammars** (`is_endless`) are those in Lark's notation that no finite text fits: each way through `start`
needs a rule that never ends. The engine finds no fault with ``start: "a" start``, and a model would write until its
answer's length is used up. Only what a rule is made of is looked at; where the notation has something that isn't known
here, nothing is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from twinpool.contracts.grammar import BOUNDS, engine_error
from twinpool.contracts.outside_data import read_json
from twinpool.router.schemas.schema_parts import SchemaError, ending


@lru_cache(maxsize=64)
def check_grammar(grammar: str) -> str:
    """Compile a grammar as workers will; return why that can't be done, empty where it can. Takes up to a second: to be
    called where that, and the memory it takes, hurts nobody else."""
    return why_not_compiled(grammar)


def why_not_compiled(grammar: str) -> str:
    """Return what `check_grammar` does, and remember nothing."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    bounds: dict[str, Any] = {**BOUNDS, "verbose_errors": False}
    limits = LLParserLimits(**bounds)
    _, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if told:
        return engine_error(told[0])
    beginning = LLMatcher(LLTokenizer("byte"), grammar, limits=limits, log_level=0)
    beginning.compute_bitmask()
    return engine_error(beginning.get_error()) if beginning.is_error() else ""


_UNTIL = re.compile(r'(\w+)\[suffix=("(?:[^"\\]|\\.)*")\]: (/\(\?s:\.\*\)/)')
"""A rule that takes text up to a mark: its name, the mark and the text."""
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|%json ')
"""A literal, a regular expression, or the beginning of a schema."""


def with_special_marks(grammar: str, tokens: Mapping[str, int]) -> str:
    """Return a grammar with those marks in its own rules that are `tokens`, each by its id.

    `grammar` is the text of one of llguidance's with Lark rules first; the grammars that they name aren't changed.
    """
    tree = json.loads(grammar)
    lark = tree["grammars"][0].get("lark_grammar")
    if lark is None or not tokens:
        return grammar
    marks = re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")
    lark = _UNTIL.sub(lambda found: _until(found, marks), lark)
    tree["grammars"][0]["lark_grammar"] = "".join(_pieces(lark, marks, tokens))
    return json.dumps(tree)


def _pieces(lark: str, marks: re.Pattern[str], tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield the text of the rules, with other literals."""
    at = 0
    while (found := _PIECE.search(lark, at)) is not None:
        yield lark[at : found.start()]
        end = found.end()
        if found[0].startswith("%json"):
            _, end = json.JSONDecoder().raw_decode(lark, end)
        piece = lark[found.start() : end]
        yield _literal(piece, marks, tokens) if piece.startswith('"') else piece
        at = end
    yield lark[at:]


def _until(found: re.Match[str], marks: re.Pattern[str]) -> str:
    name, mark, text = found.groups()
    if (first := marks.search(json.loads(mark))) is None:
        return found[0]
    before = json.dumps(json.loads(mark)[: first.start()], ensure_ascii=False)
    rest = json.dumps(json.loads(mark)[first.start() :], ensure_ascii=False)
    if first.start() == 0:
        return f"{name}: {text} {rest}"
    # Text may have what stands before the special token, and go on.
    return f"{name}: {name}_part+ {rest}\n{name}_part[suffix={before}]: {text}"


def _literal(literal: str, marks: re.Pattern[str], tokens: Mapping[str, int]) -> str:
    pieces = [piece for piece in marks.split(json.loads(literal)) if piece]
    if not any(piece in tokens for piece in pieces):
        return literal
    written = [f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False) for piece in pieces]
    return written[0] if len(written) == 1 else f"({' '.join(written)})"


_LARK_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)
    |(?P<line>\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\n]*>|@[\w-]+|\.\.)
    |(?P<json>%(?:json|regex)\s*)
    |(?P<directive>%(?:ignore|import|declare)[^\n]*)
    |(?P<optional>[*?]|~\s*0{1,9}(?![0-9])(?:\s*\.\.\s*[0-9]*)?|\{\s*0*\s*,[^}\n]*\})
    |(?P<repeated>\+|~\s*[0-9]{1,9}(?:\s*\.\.\s*[0-9]*)?|\{[0-9, ]*\})
    |(?P<rule>[!?]?[A-Za-z_][\w-]*(?:\.-?[0-9]+)?(?:\s*\[[^\]\n]*\])?\s*:(?!:))
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<alias>->\s*\w+)
    |(?P<sign>[|()\[\]])""",
    re.VERBOSE,
)
_DEEP = 64
"""Groups within each other that are read."""
_Ways = list[list["str | _Ways"]]
"""Alternatives, each with the rules and groups that it needs."""


def is_endless(lark: str) -> bool:
    """Whether no text is whole by a grammar; False where that isn't known."""
    rules = _rules(lark)
    if rules is None or "start" not in rules:
        return False
    return "start" not in ending(rules, lambda name, ended: _missing(rules[name], ended, rules))


def _missing(ways: _Ways, ended: set[str], rules: dict[str, _Ways]) -> list[str] | None:
    """Return rules of which one must be over first, one a way; None where some way needs none."""
    found: list[str] = []
    for way in ways:
        blocking: list[str] | None = None
        for part in way:
            if isinstance(part, str):
                blocking = [part] if part in rules and part not in ended else None
            else:
                blocking = _missing(part, ended, rules)
            if blocking is not None:
                found += blocking
                break
        if blocking is None:
            return None
    return found


def _rules(lark: str) -> dict[str, _Ways] | None:
    """Read the rules; None for a notation that isn't known here."""
    rules: dict[str, _Ways] = {}
    stack: list[_Ways] = []
    at, fresh = 0, True
    while at < len(lark):
        if (found := _LARK_TOKEN.match(lark, at)) is None:
            return None
        at, kind, text = found.end(), found.lastgroup, found[0]
        if kind == "json":
            try:
                _, at = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError):
                return None
        if kind == "rule" and fresh:
            if len(stack) > 1:
                return None
            stack = [rules.setdefault(re.split(r"[.\[:\s]", text.lstrip("!?"))[0], [])]
            stack[0].append([])
        elif kind == "directive" and fresh:
            stack = []
        elif kind in ("rule", "directive") or (not stack and kind not in ("skip", "line")):
            return None
        elif kind == "name":
            stack[-1][-1].append(text)
        elif kind in ("text", "json"):
            stack[-1][-1].append([[]])
        elif kind == "optional":
            if not stack[-1][-1]:
                return None
            stack[-1][-1][-1] = [[]]
        elif text == "|":
            stack[-1].append([])
        elif kind == "sign" and text in "([":
            stack.append([[]])
            if len(stack) > _DEEP:
                return None
        elif kind == "sign":
            if len(stack) < 2:
                return None
            group = stack.pop()
            stack[-1][-1].append([[]] if text == "]" else group)
        fresh = kind == "line" or (fresh and kind == "skip")
    return rules if len(stack) < 2 else None


MAX_SCHEMAS = 64
"""Schemas within one grammar."""
_JSON = "%json"
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<mark><[^<>\s]+>)
    |(?P<json>%json)
    |(?P<other>[^"/#<%]+|.)""",
    re.VERBOSE,
)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SHOWN_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_RULE_NAMED = re.compile(r"Rule '([\w-]+)'")
_REGEX_PLACE = re.compile(r"regex parse error:\n    (?P<shown>[^\n]*)\n(?P<under> +)\^")


class _Piece(NamedTuple):
    """A piece of the engine's text, and where it comes from in the client's."""

    made: int
    sent: int
    moved: bool
    """Whether the client's text isn't the same here."""


class ClientGrammar(NamedTuple):
    """A grammar that a client sent, as text and as the engine takes it."""

    sent: str
    lark: str
    pieces: tuple[_Piece, ...]
    """In their order; of a grammar in GBNF none."""

    @classmethod
    def read(cls, sent: str, schema_text: Callable[[object, str], str]) -> ClientGrammar:
        """Read a grammar. `schema_text` makes the engine's schema of a client's, given its line and column. Raises
        `SchemaError` for what is neither notation, and for a schema that isn't JSON."""
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            lark = any_to_lark(sent)
        except (GbnfToLarkError, RecursionError) as error:
            raise SchemaError("", str(error).strip()[:300]) from None
        except Exception as error:  # Its errors of rules that aren't there have no class of their own.
            name = _RULE_NAMED.search(str(error))
            named = None if name is None else list(re.finditer(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", sent))
            raise SchemaError(line_and_column(sent, named[-1].start()) if named else "", f"{error}"[:300]) from None
        if _JSON not in lark:
            return cls(sent, lark, (_Piece(0, 0, False),) if lark == sent else ())
        made, pieces = _with_schemas(lark, schema_text if lark == sent else _none)
        return cls(sent, made, pieces if lark == sent else ())

    def told(self, error: str) -> str:
        """Return an error of the engine's with its place in the client's text."""
        error = _SHOWN_LINES.sub("", error).strip()
        if (found := _PLACE.match(error)) is None:
            return error
        line, column, why = int(found[1]), int(found[2]), found[3]
        at = _offset(self.lark, line, column)
        if self.pieces:
            piece = [each for each in self.pieces if each.made <= at][-1]
            return f"at {line_and_column(self.sent, piece.sent + (0 if piece.moved else at - piece.made))}: {why}"
        rule = re.findall(r"^([A-Za-z_]\w*)\s*:", self.lark[: at + 1], re.MULTILINE)
        place = self._rule_place(rule[-1]) if rule else ""
        return f"at {place}: {why}" if place else why

    def _rule_place(self, name: str) -> str:
        """The line and column of the GBNF rule that became a rule."""
        wanted = "root" if name == "start" else name.lower().replace("_", "-")
        for found in re.finditer(r"^[ \t]*([A-Za-z][\w-]*)\s*::=", self.sent, re.MULTILINE):
            if found[1].lower().replace("_", "-") == wanted:
                return line_and_column(self.sent, found.start(1))
        return ""


def line_and_column(text: str, at: int) -> str:
    """Return a place in a text in words, both counted from 1."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


def regex_error(told: str, pattern: str) -> str:
    """Return the engine's error about a client's regular expression, with the place in that."""
    told = _SHOWN_LINES.sub("", told).strip()
    why = told.rpartition("\nerror: ")[2] if "\nerror: " in told else (_PLACE.sub(r"\3", told))
    found = _REGEX_PLACE.search(told)
    if found is None or found["shown"] not in pattern:
        return f"regular expression: {why}"
    at = pattern.index(found["shown"]) + len(found["under"]) - 4
    return f"at {line_and_column(pattern, at)}: regular expression: {why}"


def _none(schema: object, where: str) -> str:
    raise SchemaError("", f"{_JSON} is no part of GBNF")


def _offset(text: str, line: int, column: int) -> int:
    begin = 0
    for _ in range(line - 1):
        begin = text.find("\n", begin) + 1
    return min(begin + column - 1, len(text))


def _with_schemas(lark: str, schema_text: Callable[[object, str], str]) -> tuple[str, tuple[_Piece, ...]]:
    made: list[str] = []
    pieces: list[_Piece] = []
    size = at = count = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        assert found is not None or lark[at] == "\n"
        end = at + 1 if found is None else found.end()
        kind = None if found is None else found.lastgroup
        text, moved = lark[at:end], False
        if kind == "json":
            count += 1
            where = line_and_column(lark, at)
            if count > MAX_SCHEMAS:
                raise SchemaError(where, f"at most {MAX_SCHEMAS} schemas may be in one grammar")
            schema, end = _schema_at(lark, end, where)
            text, moved = f"{_JSON} {schema_text(schema, where)}", True
        elif _JSON in text:
            if kind == "mark":
                raise SchemaError(line_and_column(lark, at), f"{_JSON} can't be in the name of a mark")
            text, moved = _coded(text, kind or ""), True
        pieces.append(_Piece(size, at, moved))
        made.append(text)
        size += len(text)
        at = end
    return "".join(made), tuple(pieces)


def _schema_at(lark: str, at: int, where: str) -> tuple[object, int]:
    while at < len(lark) and lark[at] in " \t\r\n":
        at += 1
    try:
        _, end = json.JSONDecoder().raw_decode(lark, at)
        return read_json(lark[at:end]), end
    except (ValueError, RecursionError) as error:
        told = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(": line")[0]
        raise SchemaError(where, f"what follows {_JSON} is no JSON: {told}") from None


def _coded(text: str, kind: str) -> str:
    """Return a text, regular expression or comment that means the same and in which the engine finds no schema."""
    if kind == "comment":
        return text.replace("%", " ")
    code = r"\u0025" if kind == "text" else r"\x25"
    return re.sub(r"\\.|%", lambda found: code if found[0] in ("%", r"\%") else found[0], text, flags=re.DOTALL)
