"""Prints docs/configuration.md from the source of the configuration; `docs/configuration.md` is its output."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator

from twinpool.contracts.config import cache_config, cluster_config

_KINDS: dict[object, str] = {int: "whole", float: "number", bool: "yes/no", str: "text"}


def main() -> str:
    out = [
        "# Configuration",
        "",
        "Every key, from the source. Values come from defaults, then `--config FILE`, then `--set section.key=value`;",
        "unknown keys are refused by name.",
    ]
    for section in dataclasses.fields(cluster_config.Config):
        cls = typing.get_type_hints(cluster_config.Config)[section.name]
        out += ["", f"## {section.name}", "", f"{inspect.getdoc(cls)}\n" if cls is cluster_config.FaultsConfig else ""]
        out += ["| key | values | default | meaning |", "|---|---|---|---|"]
        out += list(rows(cls, section.name))
    return "\n".join(out).replace("\n\n\n", "\n\n") + "\n"


def rows(cls: type, prefix: str) -> Iterator[str]:
    meanings, hints = notes(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and kind is not cache_config.CacheOverride:
            yield from rows(typing.cast(type, kind), f"{prefix}.{field.name}")
            continue
        if dataclasses.is_dataclass(kind):
            yield f"| `{prefix}.{field.name}.*` | as `{field.name}.*` | | overrides `{field.name}` for this role |"
            continue
        choices = typing.get_args(kind)
        names = {int: "whole", float: "number", bool: "yes/no", str: "text"}
        values = ", ".join(map(str, choices)) if choices else names[kind]
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        default = "empty" if default == "" else default
        yield f"| `{prefix}.{field.name}` | {values} | `{default}` | {meanings.get(field.name, '')} |"


def notes(cls: type) -> dict[str, str]:
    """The docstrings below the fields of `cls`."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


if __name__ == "__main__":
    print(main(), end="")
