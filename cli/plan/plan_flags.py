"""The flags of `twinpool plan`."""

from __future__ import annotations

from pathlib import Path

from twinpool.cli.command_flag import CommandFlag, trace_flags

_ONE = ("plan",)
COSTS = Path("twinpool-costs.json")
PLAN_FLAGS = (
    *trace_flags("plan", "JSONL file of a trace, as replay takes", needed=False),
    CommandFlag(
        ("--slo",),
        _ONE,
        "what a good answer keeps, in seconds, as replay takes it (ttft=5,itl=0.1)",
        {"default": "ttft=5,itl=0.1", "metavar": "ttft=S,itl=S"},
    ),
    CommandFlag(("--share",), _ONE, "part of the requests that must be good (0.99)", {"type": float, "default": 0.99}),
    CommandFlag(
        ("--costs",),
        _ONE,
        f"file of measured costs, which --measure writes ({COSTS})",
        {"type": Path, "default": COSTS, "metavar": "FILE"},
    ),
    CommandFlag(("--measure",), _ONE, "measure the costs first, for about a minute", {"action": "store_true"}),
    CommandFlag(
        ("--url",),
        _ONE,
        "with --measure: a cluster that runs and serves nobody (default: one worker of each role is started here)",
        {"default": ""},
    ),
    CommandFlag(("--model",), _ONE, "with --measure: the model to start, as serve takes it (demo)", {"default": ""}),
    CommandFlag(("--config",), _ONE, "with --measure: YAML file, as serve takes it", {"type": Path, "metavar": "FILE"}),
    CommandFlag(
        ("--set",),
        _ONE,
        "with --measure: set one configuration key; may be repeated",
        {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"},
    ),
    CommandFlag(
        ("--token-range",), _ONE, "with --measure: token ids to make prompts of (300:2000)", {"default": "300:2000"}
    ),
    CommandFlag(("--speed",), _ONE, "the trace so much faster (1)", {"type": float, "default": 1.0}),
    CommandFlag(("--limit",), _ONE, "the first N requests only", {"type": int, "metavar": "N"}),
    CommandFlag(("--scale-lengths",), _ONE, "multiply the trace's lengths (1)", {"type": float, "default": 1.0}),
    CommandFlag(("--max-context",), _ONE, "cut requests to so many tokens in all", {"type": int, "metavar": "TOKENS"}),
    CommandFlag(
        ("--max-workers",), _ONE, "workers of each pool at most (64)", {"type": int, "default": 64, "metavar": "N"}
    ),
    CommandFlag(
        ("--policy",),
        _ONE,
        "router.policy (cache_aware)",
        {
            "choices": ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session"),
            "default": "cache_aware",
        },
    ),
    CommandFlag(("--json",), _ONE, "write the plan to a file", {"type": Path, "metavar": "FILE"}),
)
