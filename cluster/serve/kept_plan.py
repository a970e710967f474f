"""The plan of a detached cluster as it is kept: what it was given and what was measured, and nothing worked out.

Whoever reads it works the rest out again, so that a supervisor of another build, whose classes differ, can take the
cluster over. What can't be measured again is kept: memory that is free now is what the cluster itself leaves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from twinpool.cluster.assembly.device_cards import CardFacts
from twinpool.cluster.assembly.node_shares import NodeFacts
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, plan_again
from twinpool.contracts.checkpoint.model_spec import read_model_spec, served_as
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role

OPTIONS = ("model", "prefill", "decode", "colocate", "routers", "host", "port", "ray_address", "dashboard")
"""The options that matter after the start; the configuration has the rest."""


def plan_to_tree(plan: ServePlan) -> dict[str, Any]:
    """The plan as values that JSON takes."""
    return {
        "options": {name: getattr(plan.options, name) for name in OPTIONS}
        | {"model": str(plan.spec.path), "config": plan.options.file},
        "given": plan.given.to_dict(),
        "port": plan.port,
        "source": plan.source,
        "device": plan.config.engine.device,
        "plane": plan.config.transfer.plane,
        "nodes": {node: _facts_to_tree(share.facts) for node, share in plan.shares.items()},
    }


def plan_from_tree(tree: dict[str, Any]) -> ServePlan:
    """Work a plan out again. Raises `ConfigError` where this build doesn't take what an earlier one was given,
    `CheckpointError` and `MemoryShort` as at the start, and `KeyError`, `TypeError` or `ValueError` for a tree that is
    none."""
    file = tree["options"].get("config")  # Earlier builds kept none.
    options = ServeOptions(**{name: tree["options"][name] for name in OPTIONS}, config=Path(file) if file else None)
    nodes = {node: _facts_from_tree(facts) for node, facts in tree["nodes"].items()}
    given = config_from_dict(tree["given"])
    spec = served_as(read_model_spec(Path(options.model), given.engine.context), given.router.served_model_name)
    chosen = {"device": tree["device"], "plane": tree["plane"], "source": tree.get("source", "")}
    return plan_again(options, spec, given, int(tree["port"]), nodes, **chosen)


def _facts_to_tree(facts: NodeFacts) -> dict[str, Any]:
    places = {str(role): count for role, count in facts.places.items()}
    return dataclasses.asdict(dataclasses.replace(facts, places={})) | {"places": places}


def _facts_from_tree(tree: dict[str, Any]) -> NodeFacts:
    cards = tuple(CardFacts(**{**card, "peers": tuple(card["peers"])}) for card in tree["cards"])
    places = {Role(role): int(count) for role, count in tree["places"].items()}
    return NodeFacts(**{**tree, "places": places, "cards": cards})
