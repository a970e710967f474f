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
        "latency targets in seconds, as for replay (ttft=5,itl=0.1)",
        {"default": "ttft=5,itl=0.1", "metavar": "ttft=S,itl=S"},
    ),
    CommandFlag(
        ("--share",), _ONE, "share of requests that must meet the targets (0.99)", {"type": float, "default": 0.99}
    ),
    CommandFlag(
        ("--costs",),
        _ONE,
        f"file of measured costs, written by --measure ({COSTS})",
        {"type": Path, "default": COSTS, "metavar": "FILE"},
    ),
    CommandFlag(("--measure",), _ONE, "measure the costs first, for about a minute", {"action": "store_true"}),
    CommandFlag(
        ("--url",),
        _ONE,
        "with --measure: an idle cluster (default: start one worker of each role here)",
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
    CommandFlag(("--speed",), _ONE, "speed-up factor for the trace (1)", {"type": float, "default": 1.0}),
    CommandFlag(("--limit",), _ONE, "use only the first N requests", {"type": int, "metavar": "N"}),
    CommandFlag(("--scale-lengths",), _ONE, "multiply the trace's lengths (1)", {"type": float, "default": 1.0}),
    CommandFlag(
        ("--max-context",), _ONE, "truncate requests to this many tokens in total", {"type": int, "metavar": "TOKENS"}
    ),
    CommandFlag(
        ("--max-workers",), _ONE, "maximum workers per pool (64)", {"type": int, "default": 64, "metavar": "N"}
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
