"""The process of one of several models: its cluster, as `twinpool serve` runs one, without routers.

``python -m twinpool.cluster.serve.model_cluster --config FILE --report FILE --within FOLDER --logs FOLDER
--free-bytes N --models N --first-card N [--kept FOLDER] --ready-fd N``

The routers of all models are started by who starts this process (`cluster.serve.serve_models`). Once its workers serve
it writes to the report what these routers are to know (`RoutedModel`). It ends on SIGTERM, and with the run that has
begun it. With ``--kept`` it becomes the keeper of a detached cluster (`cluster.serve.detached_cluster`), whose files
are in that folder: it ends on SIGTERM, and when it is killed the next one takes over what runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import msgspec

from twinpool.cluster.assembly.node_shares import CardFacts, cards_of
from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.cluster.processes.run_folder import RunFolder
from twinpool.cluster.serve.detached_cluster import KEEPER, given_secrets, keeper_command, keeper_environment
from twinpool.cluster.serve.detached_state import READY_FILE, DetachedState
from twinpool.cluster.serve.models_config import places_of
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.cluster.serve.router_services import SharedRouters
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
    parser.add_argument("--kept", type=Path, help="folder of the detached cluster whose keeper it becomes")
    parser.add_argument("--ready-fd", type=int, required=True, help="descriptor that is closed: the report says more")
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


class LinkedRouters(SharedRouters):
    """Routers that find the table of the KV index at a name that stays when this process is started again."""

    def tell(self, routed: RoutedModel) -> None:
        if routed.kv_index:
            link = self.report.with_suffix(".kv-index")
            fresh = self.report.with_suffix(".new-index")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(routed.kv_index)
            fresh.replace(link)
            routed = msgspec.structs.replace(routed, kv_index=str(link))
        super().tell(routed)


def planned(options: argparse.Namespace) -> ServePlan:
    """The plan of the model's cluster, which has no routers. Raises `TwinpoolError` where it can't be served."""
    config = load_config(options.config)
    joined = bool(config.launch.ray_address)
    prepared = prepare(
        ServeOptions.of_file(options.config),
        None if joined else options.free_bytes,
        () if joined else own_cards(config, options.first_card),
        models=options.models,
    )
    return dataclasses.replace(prepared, options=dataclasses.replace(prepared.options, routers=0))


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM; returns the exit code. Raises `TwinpoolError` where the model can't be served."""
    prepared = planned(options)

    def serve(folder: RunFolder, out: TextIO, stopping: ShutdownSignal) -> int:
        return ServeCluster(prepared, folder, out, stopping=stopping, shared=LinkedRouters(options.report)).run()

    return in_terminal(prepared.config.cluster.stop_timeout_s, serve, lambda: ModelRun(options.within, options.logs))


def keep(options: argparse.Namespace) -> NoReturn:
    """Go on as the keeper of a detached cluster, the one that runs in its folder where one has served there. Raises
    `TwinpoolError` where the model can't be served."""
    folder: Path = options.kept
    if not (folder / READY_FILE).exists():
        ReapedRun(folder.name, str(folder)).end()  # A keeper that was killed before its cluster served left it there.
        folder.mkdir(mode=0o700)
        DetachedState(
            folder, options.logs, planned(options), secrets=given_secrets(), report=str(options.report)
        ).save()
    (folder / KEEPER).write_text(str(os.getpid()))
    command = keeper_command(folder)
    os.execve(command[0], command, keeper_environment(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream("serve")
    os.close(options.ready_fd)  # It serves once its report is there.
    try:
        if options.kept is not None:
            keep(options)
        return run(options)
    except TwinpoolError as error:
        sys.stderr.write(f"error: {error}\n")  # Its log, whose last words the operator is shown.
        return 1


if __name__ == "__main__":
    sys.exit(main())
