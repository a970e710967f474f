"""The process of one of several models: its cluster, as `twinpool serve` runs one, without routers.

``python -m twinpool.cluster.serve.model_cluster --config FILE --report FILE --within FOLDER --logs FOLDER
--free-bytes N --models N --first-card N --ready-fd N``

The routers of all models are started by who starts this process (`cluster.serve.serve_models`). Once its workers serve
it writes to the report what these routers are to know (`RoutedModel`), and a line to the descriptor. It ends on
SIGTERM, and with the run that has begun it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from twinpool.cluster.assembly.node_shares import CardFacts, cards_of
from twinpool.cluster.processes.run_folder import RunFolder
from twinpool.cluster.serve.models_config import places_of
from twinpool.cluster.serve.preflight import ServeOptions, prepare
from twinpool.cluster.serve.serve_cluster import ServeCluster
from twinpool.cluster.serve.shutdown_signal import ShutdownSignal
from twinpool.cluster.serve.terminal import in_terminal
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.messages.router_report import RoutedModel


class ModelRun(RunFolder):
    """The folders of one model's cluster. Commands find the run of all models, so it has no run file of its own."""

    def publish(self, url: str, model: str, ca: str = "", config: str = "") -> None:
        """Nothing to write."""


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="twinpool.cluster.serve.model_cluster")
    parser.add_argument("--config", type=Path, required=True, help="the model's whole configuration")
    parser.add_argument("--report", type=Path, required=True, help="file for what routers are to know")
    parser.add_argument("--within", type=Path, required=True, help="temporary folder of the run that has begun this")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--free-bytes", type=int, help="this machine's memory for it; left out: what is measured")
    parser.add_argument("--models", type=int, default=1, help="models that this machine's cores are divided among")
    parser.add_argument("--first-card", type=int, default=0, help="GPUs that other models have")
    parser.add_argument("--ready-fd", type=int, required=True, help="descriptor that is told when it serves")
    return parser.parse_args(arguments)


def own_cards(config: Config, first: int) -> tuple[CardFacts, ...]:
    """The cards of this machine that the model's workers have: from number `first` on, one for each rank. One that its
    `engine.device` names by number is its own. Raises `ConfigError` where there are too few."""
    cards, needed = cards_of(config.engine.device), places_of(config)
    if not cards or ":" in config.engine.device:
        return cards
    mine = cards[first : first + needed]
    if len(mine) < needed:
        raise ConfigError(
            f"its workers need {needed} GPUs besides the {first} of other models, and this machine has {len(cards)}: "
            "name a model's GPU by engine.device=cuda:N, which several may share, or engine.device=cpu"
        )
    return mine


def report(routed: RoutedModel, to: Path) -> None:
    """Write what routers are to know, at once: a reader finds all of it, or what was there before. The table of the KV
    index is found at a name that stays when this process is started again."""
    if routed.kv_index:
        link = to.with_suffix(".kv-index")
        fresh = to.with_suffix(".new-index")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(routed.kv_index)
        fresh.replace(link)
        routed = msgspec.structs.replace(routed, kv_index=str(link))
    written = to.with_suffix(".new")
    written.write_bytes(msgspec.json.encode(routed))
    written.replace(to)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM; returns the exit code. Raises `TwinpoolError` where the model can't be served."""
    config = load_config(options.config)
    joined = bool(config.launch.ray_address)
    prepared = prepare(
        ServeOptions.of_file(options.config),
        None if joined else options.free_bytes,
        () if joined else own_cards(config, options.first_card),
        models=options.models,
    )
    prepared = dataclasses.replace(prepared, options=dataclasses.replace(prepared.options, routers=0))

    def ready(routed: RoutedModel) -> None:
        report(routed, options.report)
        os.write(options.ready_fd, b"ready\n")
        os.close(options.ready_fd)

    def serve(folder: RunFolder, out: TextIO, stopping: ShutdownSignal) -> int:
        return ServeCluster(prepared, folder, out, stopping=stopping, on_ready=ready).run()

    return in_terminal(prepared.config.cluster.stop_timeout_s, serve, lambda: ModelRun(options.within, options.logs))


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream("serve")
    try:
        return run(options)
    except TwinpoolError as error:
        sys.stderr.write(f"error: {error}\n")  # Its log, whose last words the operator is shown.
        return 1


if __name__ == "__main__":
    sys.exit(main())
