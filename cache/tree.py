"""The prefix tree: a radix tree over pages of tokens, whose nodes own the state of their run of pages.

    root --[page a, page b]--> node --[page c]--> leaf
                                  \\--[page d, page e]--> leaf

A node's key is a run of whole pages; children differ in their first page. Each *component* (full attention now;
sliding windows and recurrent states join through the same interface) keeps its own value at a node and says whether
it accepts the node. The *anchor* is the deepest node that every component accepts: matching stops there, locks reach
to there, and nothing is computed from further down.

Nodes own their pages through leases. `lock` pins a path against eviction and returns a token; only that token
unlocks it, replaying exactly what was locked, also after nodes were split. What isn't locked may be evicted, least
recently used leaf first, from its tail.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cache.leases import Lease
from cache.tags import ContentTag
from contracts.ids import Epoch

PageKey = bytes
"""The tokens of one page, 4 bytes each."""


def page_keys(tokens: Sequence[int], page_tokens: int) -> list[PageKey]:
    """The keys of the whole pages of `tokens`."""
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    step = 4 * page_tokens
    return [raw[at : at + step] for at in range(0, len(raw) - step + 1, step)]


class Value(Protocol):
    """What one component keeps at one node."""

    def split(self, count: int) -> Value:
        """Take the first `count` pages' part out into a new value; this one keeps the rest."""

    def free(self) -> None: ...

    def check(self, pages: int) -> list[str]: ...


class Component(Protocol):
    """One kind of state in the tree."""

    name: str

    def accepts(self, value: Value | None) -> bool:
        """Whether positions up to the end of a node with this value can be computed from."""


@dataclass
class FullValue:
    """Pages of the full-attention pool, one a page of tokens, each sealed."""

    lease: Lease
    tags: tuple[ContentTag, ...]

    def split(self, count: int) -> FullValue:
        head = FullValue(self.lease.split(count, self.lease.owner), self.tags[:count])
        self.tags = self.tags[count:]
        return head

    def free(self) -> None:
        self.lease.release()

    def check(self, pages: int) -> list[str]:
        if not self.lease.live:
            return ["its lease has ended"]
        if len(self.lease) != pages or len(self.tags) != pages:
            return [f"{pages} pages, but {len(self.lease)} leased and {len(self.tags)} sealed"]
        return []


class Full:
    """The full-attention component: every page up to the anchor must be there."""

    name = "full"

    def accepts(self, value: Value | None) -> bool:
        return value is not None


@dataclass(eq=False)
class Node:
    key: list[PageKey]
    parent: Node | None
    values: dict[str, Value]
    children: dict[PageKey, Node] = field(default_factory=dict)
    locks: set[int] = field(default_factory=set)
    used: int = 0
    condemned: bool = False
    """Not to be matched any more, nor anything below."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a prefix holds, up to the anchor, locked until `token` is given back."""

    token: int
    pages: tuple[int, ...]
    tags: tuple[ContentTag, ...]
    epochs: tuple[Epoch, ...]
    """Of `pages`, as the tree leased them."""


class PrefixTree:
    """See the module's prose. One tree a seat; salts keep strangers apart by having roots of their own."""

    def __init__(self, components: Sequence[Component] = (Full(),)) -> None:
        self._components = components
        self._roots: dict[str, Node] = {}
        self._locked: dict[int, list[Node]] = {}
        self._condemned: list[Node] = []
        self._next_token = 1
        self._clock = 0

    # ------------------------------------------------------------ match, lock, insert

    def match(self, keys: Sequence[PageKey], salt: str = "") -> Match:
        """Find and lock the longest prefix of `keys` that every component accepts."""
        path: list[Node] = []
        node = self._roots.get(salt) or Node([], None, {})
        at = 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None and not child.condemned:
            if not all(c.accepts(child.values.get(c.name)) for c in self._components):
                break
            shared = _common(child.key, keys, at)
            if shared < len(child.key):
                child = self._split(child, shared)
            path.append(child)
            at += shared
            node = child
        token = self._lock(path)
        values = [n.values["full"] for n in path]
        pages = tuple(p for v in values if isinstance(v, FullValue) for p in v.lease.indices)
        tags = tuple(t for v in values if isinstance(v, FullValue) for t in v.tags)
        epochs = tuple(e for v in values if isinstance(v, FullValue) for e in v.lease.epochs)
        return Match(token, pages, tags, epochs)

    def unlock(self, token: int) -> None:
        """Give back what `match` locked. Idempotent."""
        for node in self._locked.pop(token, ()):
            node.locks.discard(token)
        self._condemned = [node for node in self._condemned if not self._prune(node)]

    def condemn(self, keys: Sequence[PageKey], salt: str = "") -> int:
        """Never again match what hangs on the first page of `keys`: some of its state was found damaged.

        Freed at once where nobody locks it, else with its last lock. Returns the number of pages condemned.
        """
        root = self._roots.get(salt)
        node = root.children.get(keys[0]) if root is not None and keys else None
        if node is None or node.condemned:
            return 0
        count = sum(len(n.key) for n in _below(node))
        node.condemned = True
        if not self._prune(node):
            self._condemned.append(node)
        return count

    def _prune(self, node: Node) -> bool:
        """Free what nobody locks of `node` and below; whether that was all."""
        if all([self._prune(child) for child in list(node.children.values())]) and not node.locks:
            self._remove(node)
            return True
        return False

    def insert(
        self, keys: Sequence[PageKey], lease: Lease, skip: int, tags: Sequence[ContentTag], salt: str = ""
    ) -> int:
        """Give finished pages to the tree: `lease` holds those of `keys[skip:]`, `tags` are the seals of all `keys`.

        The tree takes what it doesn't hold yet and leaves the rest in `lease`; returns the number of pages taken.
        """
        node, at = self._walk(keys, self._root(salt))
        if at < skip or at == len(keys) or keys[at] in node.children:
            # The part before `lease` was evicted meanwhile, everything is here already, or it is condemned and in
            # its last use: nothing to hang it on.
            return 0
        part = lease.split(len(keys) - at, "tree", start=at - skip)
        self._clock += 1
        value = FullValue(part, tuple(tags[at : len(keys)]))
        node.children[keys[at]] = Node(list(keys[at:]), node, {"full": value}, used=self._clock)
        return len(keys) - at

    def _walk(self, keys: Sequence[PageKey], node: Node) -> tuple[Node, int]:
        at = 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None and not child.condemned:
            shared = _common(child.key, keys, at)
            if shared < len(child.key):
                child = self._split(child, shared)
            at += shared
            node = child
        return node, at

    def _lock(self, path: list[Node]) -> int:
        token = self._next_token
        self._next_token += 1
        self._clock += 1
        for node in path:
            node.locks.add(token)
            node.used = self._clock
        self._locked[token] = path
        return token

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` pages; returns the new upper half. The lower half stays the object it was."""
        assert node.parent is not None
        values = {name: value.split(count) for name, value in node.values.items()}
        upper = Node(node.key[:count], node.parent, values, {node.key[count]: node}, set(node.locks), node.used)
        node.parent.children[node.key[0]] = upper
        node.key, node.parent = node.key[count:], upper
        for token in upper.locks:
            path = self._locked[token]
            path.insert(path.index(node), upper)
        return upper

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node([], None, {})
        return root

    # ------------------------------------------------------------ eviction

    def evict(self, pages: int) -> int:
        """Free up to `pages` pages that nobody locks, least recently used leaf first; returns how many."""
        freed = 0
        heap = [(n.used, i, n) for i, n in enumerate(self._nodes()) if _evictable(n)]
        heapq.heapify(heap)
        order = len(heap)
        while heap and freed < pages:
            _, _, leaf = heapq.heappop(heap)
            keep = len(leaf.key) - (pages - freed)
            if keep > 0:
                self._split(leaf, keep)
            freed += len(leaf.key)
            parent = self._remove(leaf)
            if _evictable(parent):
                order += 1
                heapq.heappush(heap, (parent.used, order, parent))
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}
        return freed

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now."""
        return sum(len(n.key) for n in self._nodes() if not n.locks and n.parent is not None)

    @property
    def pages(self) -> int:
        return sum(len(n.key) for n in self._nodes())

    def _remove(self, leaf: Node) -> Node:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[0]]
        for value in leaf.values.values():
            value.free()
        return parent

    def _nodes(self) -> list[Node]:
        return [node for root in self._roots.values() for node in _below(root)]

    # ------------------------------------------------------------ invariants

    @property
    def locks(self) -> int:
        return len(self._locked)

    def check(self) -> list[str]:
        """Recompute links, ownership and locks from scratch; returns what doesn't hold."""
        found = []
        held: dict[int, set[int]] = {}
        for token, path in self._locked.items():
            for node in path:
                held.setdefault(id(node), set()).add(token)
        for node in self._nodes():
            name = f"tree node of {len(node.key)} pages"
            if node.locks != held.pop(id(node), set()):
                found.append(f"{name}: its locks differ from the tokens that hold it")
            for first, child in node.children.items():
                if child.parent is not node or child.key[0] != first:
                    found.append(f"{name}: a child is linked wrongly")
                if not child.locks <= node.locks and node.parent is not None:
                    found.append(f"{name}: a child is locked and it isn't")
            if node.parent is not None:
                found += [f"{name}: {c}: {line}" for c, v in node.values.items() for line in v.check(len(node.key))]
        if held:
            found.append("tree: a token holds nodes that are no longer in the tree")
        return found


def _below(top: Node) -> list[Node]:
    """`top` and all its descendants."""
    stack, out = [top], []
    while stack:
        node = stack.pop()
        out.append(node)
        stack.extend(node.children.values())
    return out


def _evictable(node: Node) -> bool:
    return not node.children and not node.locks and node.parent is not None


def _common(run: list[PageKey], keys: Sequence[PageKey], at: int) -> int:
    """How many pages of `run` equal `keys[at:]`, at least the first."""
    count = 0
    for mine, other in zip(run, keys[at : at + len(run)], strict=False):
        if mine != other:
            break
        count += 1
    return count
