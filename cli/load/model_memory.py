"""How much memory a model's weights take, from its `config.json` alone or its checkpoint: `twinpool plan --memory`.

Nothing is read but headers, and no machine with the memory is needed: the model is built on torch's meta device as a
worker would build it, and what it takes is added up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.contracts.checkpoint.gguf.gguf_header import gguf_types, is_gguf
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec, spec_of_config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.plane_choice import on_gpus
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

if TYPE_CHECKING:
    from rich.table import Table

    from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
    from twinpool.contracts.config.cluster_config import Config
    from twinpool.contracts.config.worker_config import EngineConfig

CARDS = {"H100": 81_559 << 20, "H200": 143_771 << 20}
"""Bytes of memory of GPUs by their names, as nvidia-smi shows it."""
_CARDS = re.compile(r"(?P<count>[1-9]\d{0,3})x(?:(?P<name>[A-Z]\w*)|(?P<gib>\d+(?:\.\d+)?)GiB)")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Cards:
    """GPUs that a model's ranks are to lie on, one each."""

    text: str
    """As they were given, ``8xH100``."""
    count: int
    nbytes: int
    """Bytes of memory of each."""


def read_cards(text: str) -> Cards:
    """Read ``8xH100`` or ``8x80GiB``. Raises `ConfigError`."""
    found = _CARDS.fullmatch(text)
    if found is None or (found["name"] and found["name"] not in CARDS):
        raise ConfigError(f"--cards takes a number of {' or '.join(CARDS)}, or their memory: 8xH100, 8x80GiB; {text!r}")
    nbytes = CARDS[found["name"]] if found["name"] else int(float(found["gib"]) * _GIB)
    return Cards(text, int(found["count"]), nbytes)


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes of a model's weights."""

    parameters: int
    stored: int
    """Bytes of all tensors of the checkpoint, those included that no model here reads."""
    held: int
    """Bytes that a rank holds as this version keeps weights: of stages the largest one."""
    packed: int
    """Bytes that it would hold with weights as they are stored."""
    kinds: str
    """The quantisation: its method, or a GGUF file's types; empty for dense weights."""


def count_weights(spec: ModelSpec, config: Config, ranks: int, *, gpu: bool) -> WeightMemory:
    """Count the weights of a model, whose `spec` may have no tensors. Ranks are stages where a role's are, and
    data-parallel where workers share their experts. Raises `CheckpointError`, and `ConfigError` for numbers of ranks
    that don't divide it."""
    from twinpool.engine.models.planned_headers import asked_of, planned_spec
    from twinpool.engine.models.registry import unchecked_model
    from twinpool.engine.runner.kernel_choice import dtype_for, inputs_of, weights_kept
    from twinpool.engine.tensors.shard import Shard
    from twinpool.engine.tensors.weight_loader import Weights

    asked = asked_of(replace(spec, draft_model="", draft_head=None), config.engine)  # What drafts isn't of the model.
    dp = max(config.dp_for(role) for role in Role)
    shards = [Shard(0, ranks, ranks if max(config.ep_for(role) for role in Role) > 1 else 1)]
    if dp > 1:
        shards = [Shard(dp=dp)]
    elif ranks > 1 and _staged(config):
        shards = [Shard(stage=stage, stages=ranks) for stage in range(ranks)]
    spec = spec if spec.headers else planned_spec(spec, asked)

    def held(keep: str) -> int:
        found = []
        for shard in shards:
            weights = Weights.dry(spec, dtype_for(spec, config.engine), shard, keep, gpu=gpu)
            unchecked_model(spec, config.engine).build_dry(weights)
            found.append(weights.nbytes)
        return max(found)

    kinds = spec.quantization.method or gguf_types(spec.headers)
    keep = weights_kept(config.engine, gpu=gpu, gguf=is_gguf(spec.path))
    inputs_of(config.engine, spec.quantization, gpu=gpu)  # refused where it can't be had
    kept = held(keep)
    stored = sum(header.end - header.begin for header in spec.headers.values())
    packed = held("as_stored") if keep == "dense" and kinds else kept
    return WeightMemory(asked.parameters, stored, kept, packed, kinds)


def _staged(config: Config) -> bool:
    return max(config.pp_for(role) for role in Role) > 1


def show_memory(
    model: str,
    cards: Cards | None,
    config: Path | None,
    assignments: tuple[str, ...],
    say: Callable[[str], None],
    show: Callable[[Any], None],
) -> bool:
    """Show the memory of a model's weights on `cards`, or on what `engine.device` names, a CPU by default; returns
    whether they fit, as far as that is known.

    `model` is a folder, a GGUF file, or a `config.json` without its checkpoint. Raises `CheckpointError` and
    `ConfigError`.
    """
    path = Path(model).expanduser()
    settings = load_config(config, assignments)
    spec = _read_spec(path, settings.engine)
    gpu = cards is not None or on_gpus(settings)
    if gpu:
        _refuse_state(spec, settings)
    ranks = cards.count if cards is not None else 1
    found = count_weights(spec, settings, ranks, gpu=gpu)
    say(
        f"{spec.architecture}, {found.kinds or 'dense'}: {found.parameters / 1e9:,.1f} billion parameters, "
        f"{found.stored / _GIB:,.1f} GiB as stored"
    )
    if cards is None:
        say(f"on a {'GPU' if gpu else 'CPU'} a worker holds {found.held / _GIB:,.1f} GiB of weights")
        return True
    show(_table(spec, settings, found, cards))
    return found.held < cards.nbytes


def _read_spec(path: Path, engine: EngineConfig) -> ModelSpec:
    if not path.is_file() or is_gguf(path):
        return read_model_spec(path, engine.context, engine.draft_model)
    for key, value in (("context", engine.context), ("draft_model", engine.draft_model)):
        if value:
            raise ConfigError(f"engine.{key}={value} needs the model's folder: a config.json alone is planned without")
    return spec_of_config(path)


def _refuse_state(spec: ModelSpec, config: Config) -> None:
    """Raise `ConfigError` for state that `serve` refuses on any GPU."""
    from twinpool.engine.runner.kernel_choice import refused_kv

    if refused := refused_kv(_pool_set(spec, config)):
        raise ConfigError(refused)


def _pool_set(spec: ModelSpec, config: Config) -> PoolSetSpec:
    from twinpool.cluster.assembly.memory_plan import state_options
    from twinpool.engine.models.registry import unchecked_model

    return unchecked_model(spec, config.engine).pool_set(state_options(spec, config, Role.DECODE))


def _table(spec: ModelSpec, config: Config, found: WeightMemory, cards: Cards) -> Table:
    from rich.table import Table

    out = Table("weights", pad_edge=False)
    for column in ("a card", "all cards", cards.text):
        out.add_column(column, justify="right")
    for name, nbytes in _rows(found):
        left = cards.nbytes - nbytes
        if left < 0:
            verdict = f"{-left / _GIB:,.1f} GiB a card too much"
        else:
            positions = int(left / _position_bytes(spec, config, cards.count))
            verdict = f"{left / _GIB:,.1f} GiB a card left: {positions:,} positions, less what steps take"
        out.add_row(name, f"{nbytes / _GIB:,.1f} GiB", f"{nbytes * cards.count / _GIB:,.1f} GiB", verdict)
    return out


def _rows(found: WeightMemory) -> Iterator[tuple[str, int]]:
    if found.packed == found.held:
        yield "held on a GPU", found.held
        return
    yield "expanded (engine.weights=dense)", found.held
    yield f"as stored ({found.kinds})", found.packed


def _position_bytes(spec: ModelSpec, config: Config, ranks: int) -> float:
    """Bytes of keys and values, or latents, of a position on each of so many ranks; without what windows and states
    take."""
    from twinpool.cache.memory.kv_cache_spec import PoolKind
    from twinpool.cluster.assembly.memory_plan import unit_bytes

    pools = _pool_set(spec, config)
    if max(config.dp_for(role) for role in Role) > 1:
        ranks = 1  # Each has all of its own requests' pages.
    if ranks > 1 and _staged(config):
        stages = [pools.staged(stage, ranks) for stage in range(ranks)]
        return max(stage.page_bytes for stage in stages) / pools.page_tokens
    units = unit_bytes(pools, ranks)
    full = sum(units[pool.name] for pool in pools.pools if pool.kind is PoolKind.FULL)
    return full / ranks / pools.page_tokens
