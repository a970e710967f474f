"""Components: what a tree node can hold for one pool, one file each."""

from cache.components.base import Component
from cache.components.full import Full
from cache.components.state import State
from cache.components.window import Window
from cache.registry import Kind, PoolSetSpec


def components_of(spec: PoolSetSpec) -> tuple[Component, ...]:
    """One component a pool, the full one first."""

    def make(name: str) -> Component:
        kind = spec.by_name[name].kind
        if kind is Kind.FULL:
            return Full(name)
        return Window(name, spec.window_pages(name)) if kind is Kind.WINDOW else State(name)

    rest = [p.name for p in spec.pools if p is not spec.full]
    return tuple(make(name) for name in (spec.full.name, *rest))


__all__ = ["Component", "Full", "State", "Window", "components_of"]
