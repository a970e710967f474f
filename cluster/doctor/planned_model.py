"""The model of a planned launch, as far as it is on this machine: nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.models.hub_model import hub_name
from twinpool.cluster.models.model_source import find_model
from twinpool.cluster.models.wheel_model import WHEELS
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec, served_as
from twinpool.contracts.errors import TwinpoolError


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that a launch names."""

    path: Path | None = None
    """Its folder or GGUF file; None where it is still to be fetched."""
    spec: ModelSpec | None = None
    """None where it isn't here, or can't be read."""
    refused: TwinpoolError | None = None
    """Why it can't be read."""
    fetched_by: str = ""
    """The name that it would be fetched by, where it isn't here."""
    kept_in: Path | None = None
    """The folder that a fetched model comes to."""


def planned_model(model: str, names: str, context: int) -> PlannedModel:
    """What `--model` names, read without fetching anything. `names`: as `router.served_model_name` has them;
    `context`: as `engine.context`."""
    place = Path(model).expanduser()
    if not place.exists() and model in WHEELS:
        kept = WHEELS[model].place
        if not kept.exists():
            return PlannedModel(fetched_by=model, kept_in=kept.parent)
        return _read(kept, names, context)
    if not place.exists() and (name := hub_name(model)) is not None:
        from huggingface_hub import constants, try_to_load_from_cache

        # What decides whether the weights are worth fetching comes first, so its commit says where the rest is.
        first = try_to_load_from_cache(name.repository, name.file or "config.json", revision=name.revision)
        if not isinstance(first, str):
            return PlannedModel(fetched_by=str(name), kept_in=Path(constants.HF_HUB_CACHE))
        return _read(Path(first) if name.file else Path(first).parent, names, context)
    return _read(find_model(model, lambda _: None).path, names, context)


def _read(path: Path, names: str, context: int) -> PlannedModel:
    try:
        return PlannedModel(path, served_as(read_model_spec(path, context), names))
    except TwinpoolError as refused:
        return PlannedModel(path, refused=refused)
