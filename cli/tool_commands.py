"""The commands beside a cluster: simulated ones, loads and plans, the demonstration."""

from __future__ import annotations

import argparse

from twinpool.cli.command_parser import FINE, REFUSED, print_line, print_table
from twinpool.contracts.errors import ConfigError


def sim(args: argparse.Namespace) -> int:
    from twinpool.sim.run import sim_command
    from twinpool.sim.run.sim_command import ClusterKind

    if args.requests is not None:
        return _sim_scale(args)
    for flag in _SCALE_FLAGS:
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is for sim --requests N")
    if args.colocate and args.conditional:
        raise ConfigError("--colocate and --conditional are two kinds of cluster: give one of them")
    kind = (
        ClusterKind.COLOCATED if args.colocate else ClusterKind.CONDITIONAL if args.conditional else ClusterKind.POOLS
    )
    good = sim_command.sim(args.seed, args.seeds, args.jobs, args.shrink, args.first, print_line, kind)
    return FINE if good else REFUSED


_SCALE_FLAGS = ("workers", "seconds", "policy", "trace", "replay")
"""Flags of `sim --requests`."""


def _sim_scale(args: argparse.Namespace) -> int:
    from twinpool.sim.scale.scale_command import ScaleOptions, simulate_scale

    for flag in ("seeds", "colocate", "conditional", "shrink", "first"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is not for sim --requests, which draws no faults")
    given = {flag: getattr(args, flag) for flag in ("seed", *_SCALE_FLAGS) if getattr(args, flag) is not None}
    options = ScaleOptions(**{"workers": 8, "requests": args.requests} | given)
    return FINE if simulate_scale(options, print_line) else REFUSED


def replay(args: argparse.Namespace) -> int:
    from twinpool.cli.load import replay_command

    options = replay_command.ReplayOptions.of(args)
    return FINE if replay_command.replay(options, print_line, print_table) else REFUSED


def plan(args: argparse.Namespace) -> int:
    from twinpool.cli.load import plan_command

    if args.memory:
        return _plan_memory(args)
    if args.cards:
        raise ConfigError("--cards is for plan --memory")
    return FINE if plan_command.plan(plan_command.PlanOptions.of(args), print_line, print_table) else REFUSED


def _plan_memory(args: argparse.Namespace) -> int:
    from twinpool.cli.load.model_memory import read_cards, show_memory

    if args.trace is not None or args.measure or args.url:
        raise ConfigError("--memory counts weights and starts nothing: leave out --trace, --measure and --url")
    if not args.model:
        raise ConfigError("--memory needs --model: a folder, a GGUF file, or a config.json")
    cards = read_cards(args.cards) if args.cards else None
    return FINE if show_memory(args.model, cards, args.config, tuple(args.set), print_line, print_table) else REFUSED


def convert(args: argparse.Namespace) -> int:
    from twinpool.cluster.models import find_model
    from twinpool.contracts.checkpoint.model_spec import read_model_spec
    from twinpool.engine.tensors.convert_checkpoint import Conversion, check_target

    target = args.target.expanduser().absolute()
    check_target(target)  # Before anything is fetched.
    spec = read_model_spec(find_model(args.source, print_line).path)
    Conversion(spec, args.weights, args.group_size).write(target, print_line)
    print_line(f"written: twinpool serve --model {args.target}")
    return FINE


def demo(args: argparse.Namespace) -> int:
    from twinpool.cli.load import demo_command

    if args.minutes < 0:
        raise ConfigError(f"--minutes must not be less than 0, got {args.minutes:g}")
    return demo_command.demo(demo_command.DemoOptions(args.chaos, args.minutes, args.port, args.seed))
