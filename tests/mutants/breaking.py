"""Places in product code that can be broken one at a time, found in the syntax tree and not in a list of known rules.

A *place* is a node of a function's tree and what is done to it: a comparison turned round or moved by one, a condition
negated, a statement left out, arguments swapped, a keyword left out, and so on (`OPERATORS`). What changes only what
people read is no place: log lines, docstrings, messages of exceptions, annotations, assertions, `__repr__`.

Only code inside functions is broken, not module constants, defaults of arguments or fields of classes: a mutant
replaces a function's code object in a process that has imported everything (`tests/mutants/sweep.py`).
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_UNREAD = {"log", "logging", "logger", "warnings", "cast"}
"""Calls on these are for people, or for the type checker."""
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Place:
    """One way to break one function."""

    path: str
    """Of the file, relative to the repository."""
    function: str
    """Its qualified name; of nested ones, the outermost."""
    digest: str
    """Of the function's tree: the same as long as the function is."""
    statement: int
    """Which of the function's statements holds the node, in the order of `statements`."""
    node: int
    """Which of its nodes, in the order of `ast.walk`."""
    operator: str
    line: int
    text: str
    """The line as it stands, for people."""

    @property
    def key(self) -> str:
        raw = f"{self.path}:{self.function}:{self.digest}:{self.node}:{self.operator}"
        return hashlib.sha1(raw.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Body:
    """A function of a module that is defined in no other function."""

    name: str
    tree: Function

    @property
    def digest(self) -> str:
        return hashlib.sha1(ast.dump(self.tree).encode()).hexdigest()[:12]


def bodies(tree: ast.AST, within: str = "") -> Iterator[Body]:
    """All functions and methods, the outermost ones only."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Function):
            yield Body(within + child.name, child)
        elif isinstance(child, ast.ClassDef):
            yield from bodies(child, f"{within}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from bodies(child, within)


def statements(function: Function) -> list[ast.stmt]:
    """All statements in it, nested ones included, in a fixed order; the function itself is not one."""
    return [n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function]


# ---------------------------------------------------------------- what can be done to a node


def _compare(to: dict[type[ast.cmpop], type[ast.cmpop]]) -> Callable[[ast.AST, ast.AST], bool]:
    def change(node: ast.AST, parent: ast.AST) -> bool:
        if not isinstance(node, ast.Compare) or type(node.ops[0]) not in to:
            return False
        node.ops[0] = to[type(node.ops[0])]()
        return True

    return change


def _and_or(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.BoolOp):
        return False
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return True


def _part_of_condition_dropped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.BoolOp):
        return False
    del node.values[-1]
    if len(node.values) == 1:
        node.values.append(copy.deepcopy(node.values[0]))
    return True


def _negated(node: ast.AST, parent: ast.AST) -> bool:
    """A condition that is no comparison."""
    if not isinstance(node, ast.If | ast.While | ast.IfExp) or isinstance(node.test, ast.Compare | ast.Constant):
        return False
    if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
        node.test = node.test.operand
    else:
        node.test = ast.UnaryOp(ast.Not(), node.test)
    return True


def _arithmetic(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in _ARITHMETIC:
        return False
    if isinstance(node, ast.BinOp) and any(isinstance(x, ast.Constant | ast.JoinedStr) and not _number(x)
                                           for x in (node.left, node.right)):  # fmt: skip
        return False
    node.op = _ARITHMETIC[type(node.op)]()
    return True


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _off_by_one(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not _number(node):
        return False
    assert isinstance(node.value, int | float)
    node.value = node.value + 1
    return True


def _flag_turned(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool):
        return False
    node.value = not node.value
    return True


def _statement_removed(node: ast.AST, parent: ast.AST) -> bool:
    removable = (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await | ast.YieldFrom))
        or (isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets))
        or isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Break | ast.Continue)
    )
    if not removable:
        return False
    _replace(parent, node, ast.Pass())
    return True


def _returns_early(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, Function) or not (isinstance(node.returns, ast.Constant) and node.returns.value is None):
        return False
    if len(node.body) < 2 or any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node)):
        return False
    node.body.insert(0, ast.Return(None))
    return True


def _returns_otherwise(node: ast.AST, parent: ast.AST) -> bool:
    """A truth is turned round; of a choice of values the other one is taken."""
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    if isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp):
        node.value = ast.UnaryOp(ast.Not(), node.value)
    elif isinstance(node.value, ast.Call | ast.Name | ast.Attribute | ast.Tuple | ast.List):
        node.value = ast.Constant(None)
    else:
        return False
    return True


def _arguments_swapped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or any(isinstance(a, ast.Starred) for a in node.args):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in {*_OPPOSITE, "isinstance"}:
        return False
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return ast.dump(node.args[0]) != ast.dump(node.args[1])


def _keyword_dropped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.keyword) or node.arg is None or not isinstance(parent, ast.Call):
        return False
    parent.keywords.remove(node)
    return True


def _opposite_call(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _OPPOSITE:
        return False
    node.func = ast.Name(_OPPOSITE[node.func.id], ast.Load())
    return True


def _filter_dropped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.comprehension) or not node.ifs:
        return False
    node.ifs = []
    return True


def _branch_swapped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    node.body, node.orelse = node.orelse, node.body
    return True


def _bound_dropped(node: ast.AST, parent: ast.AST) -> bool:
    if not isinstance(node, ast.Slice) or (node.upper is None and node.lower is None):
        return False
    node.lower, node.upper = (node.lower, None) if node.upper is not None else (None, None)
    return True


OPERATORS: dict[str, Callable[[ast.AST, ast.AST], bool]] = {
    "comparison turned": _compare(_COMPARE),
    "boundary moved": _compare(_BOUNDARY),
    "and/or": _and_or,
    "last condition dropped": _part_of_condition_dropped,
    "condition negated": _negated,
    "arithmetic": _arithmetic,
    "off by one": _off_by_one,
    "flag turned": _flag_turned,
    "statement removed": _statement_removed,
    "returns at once": _returns_early,
    "returns otherwise": _returns_otherwise,
    "arguments swapped": _arguments_swapped,
    "keyword dropped": _keyword_dropped,
    "opposite call": _opposite_call,
    "filter dropped": _filter_dropped,
    "branches swapped": _branch_swapped,
    "slice bound dropped": _bound_dropped,
}


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for _, value in ast.iter_fields(parent):
        if isinstance(value, list) and any(item is old for item in value):
            value[next(i for i, item in enumerate(value) if item is old)] = new
            return
    raise ValueError("not a child in a list")


# ---------------------------------------------------------------- which nodes count


def _unread(node: ast.AST) -> bool:
    """Whether what is below `node` is only for people or for the type checker."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.arguments | ast.AnnAssign) and not (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Expr | ast.Await):
        return _unread(node.value)
    if isinstance(node, ast.Call):
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in _UNREAD
    return False


def _counted(function: Function) -> dict[int, ast.AST]:
    """Nodes that may be changed, by id, with their parents."""
    found: dict[int, ast.AST] = {}

    def walk(node: ast.AST, parent: ast.AST) -> None:
        if _unread(node):
            return
        found[id(node)] = parent
        for name, value in ast.iter_fields(node):
            if name in ("decorator_list", "returns", "annotation", "exc", "cause") or (
                isinstance(node, ast.MatchClass | ast.MatchValue | ast.ExceptHandler) and name in ("cls", "type")
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    walk(child, node)

    walk(function, function)
    return found


def places(path: str, source: str) -> list[Place]:
    """Every place of a file, in order."""
    lines = source.splitlines()
    found = []
    for body in bodies(ast.parse(source)):
        if body.tree.name in ("__repr__", "__str__"):
            continue
        counted = _counted(body.tree)
        holder = _holders(body.tree)
        for at, node in enumerate(ast.walk(body.tree)):
            if id(node) not in counted:
                continue
            for operator in OPERATORS:
                if _applies(node, counted[id(node)], operator):
                    line: int = getattr(node, "lineno", 0) or getattr(counted[id(node)], "lineno", body.tree.lineno)
                    text = lines[line - 1].strip()
                    statement = holder.get(id(node), 0)
                    found.append(Place(path, body.name, body.digest, statement, at, operator, line, text))
    return found


def _holders(function: Function) -> dict[int, int]:
    """For each node the number of the innermost statement that holds it."""
    held: dict[int, int] = {}
    for number, statement in enumerate(statements(function)):
        # Inner statements come later in `ast.walk`, and write over.
        for node in ast.walk(statement):
            held[id(node)] = number
    return held


def _applies(node: ast.AST, parent: ast.AST, operator: str) -> bool:
    """Whether the operator finds something to do, tried on copies one level deep."""
    own, around = _shallow(node), _shallow(parent)
    for _, value in ast.iter_fields(around):
        if isinstance(value, list) and any(item is node for item in value):
            value[next(i for i, item in enumerate(value) if item is node)] = own
    return OPERATORS[operator](own, around)


def _shallow(node: ast.AST) -> ast.AST:
    fields = {name: list(value) if isinstance(value, list) else value for name, value in ast.iter_fields(node)}
    return type(node)(**fields)


def _changed(function: Function, at: int, operator: str) -> Function | None:
    """A changed copy, or None where the operator doesn't apply."""
    other = copy.deepcopy(function)
    nodes = list(ast.walk(other))
    node = nodes[at]
    parent = next((n for n in nodes if any(child is node for child in ast.iter_child_nodes(n))), other)
    return other if OPERATORS[operator](node, parent) else None


def broken(place: Place, source: str) -> tuple[str, int, CodeType]:
    """The function's name and first line, and its code with that place broken. Raises `LookupError` where the file
    has no such function any more."""
    tree = ast.parse(source)
    body = next((b for b in bodies(tree) if (b.name, b.digest) == (place.function, place.digest)), None)
    if body is None:
        raise LookupError(f"{place.path}: {place.function} is not as it was")
    other = _changed(body.tree, place.node, place.operator)
    if other is None:
        raise LookupError(f"{place.path}: {place.operator} doesn't apply in {place.function}")
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and any(item is body.tree for item in value):
                value[next(i for i, item in enumerate(value) if item is body.tree)] = other
    ast.fix_missing_locations(tree)
    first = min([other.lineno, *(d.lineno for d in other.decorator_list)])
    code = compile(tree, str(ROOT / place.path), "exec", dont_inherit=True)
    return place.function, first, _find_code(code, place.function, first)


def _find_code(code: CodeType, name: str, line: int) -> CodeType:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if (const.co_qualname, const.co_firstlineno) == (name, line):
                return const
            try:
                return _find_code(const, name, line)
            except LookupError:
                continue
    raise LookupError(f"no code for {name} at line {line}")
