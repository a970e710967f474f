"""The check of a build before a detached cluster is upgraded to it.

``PYTHON -m twinpool.cluster.serve.build_check FOLDER``, run with that build's interpreter.

It prints one line of JSON: the build, and why it can't take over the cluster of FOLDER, if it can't. Nothing is
changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from twinpool.cluster.ray_nodes.ray_cluster import ray_build
from twinpool.cluster.serve.detached_state import DetachedState, ModelsState, models_in
from twinpool.contracts.build_id import build_id
from twinpool.contracts.errors import TwinpoolError


def why_not(folder: Path) -> str:
    """Why this build can't take over the cluster of `folder`, in words; empty where it can."""
    try:
        if models := models_in(folder):
            ModelsState.load(folder)
            return next((f"model {name}: {why}" for name, place in models.items() if (why := why_not(place))), "")
        state = DetachedState.load(folder)
    except (TwinpoolError, OSError) as error:
        return str(error)
    if not state.begun:
        return "the cluster has not served yet; wait for it"
    if state.ray_build and state.ray_build != ray_build():
        return (
            f"the cluster's Ray is {state.ray_build}, and {sys.executable} has {ray_build()}: a Ray takes processes of "
            "its own version and Python alone. Install those beside the new build, or start a second cluster with it "
            "and move the clients over"
        )
    return ""


def main(folder: Path) -> None:
    print(json.dumps({"build": build_id(), "refusal": why_not(folder)}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
