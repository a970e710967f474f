"""The command line of `twinpool`: its subcommands, their flags, and the parser that is made of both."""

from __future__ import annotations

from pathlib import Path

from twinpool.cli.command_flag import CommandFlag
from twinpool.cli.command_parser import CommandParser
from twinpool.cli.plan.plan_flags import PLAN_FLAGS
from twinpool.cli.replay.replay_flags import REPLAY_FLAGS

COMMANDS = {
    "serve": "start a cluster and serve a model",
    "up": "launch a detached cluster from a file, or bring a running one to what the file says",
    "doctor": "check for problems before running serve or up with the same flags or file",
    "controller": "run a controller of a cluster; with several, one leads and the others stand by",
    "down": "shut down a detached cluster",
    "status": "show workers, load and the autoscaler's decisions",
    "explain": "show a request's timeline: where its time went, and why it was placed where it ran",
    "drain": "stop admitting requests on a worker or node, finish or migrate its work, then stop it",
    "undrain": "let a draining worker or node admit requests again; restart workers that have stopped",
    "role": "move a worker to the other pool: drain it and start it in the new role",
    "add": "add workers to a pool, optionally on a given node",
    "scale": "resize pools: start or drain workers as needed",
    "restart": "drain a worker and start it again",
    "apply": "change settings and pool sizes of a running cluster, restarting workers one by one where needed",
    "upgrade": "upgrade a running detached cluster to another build without downtime",
    "cordon": "stop placing new workers on a node; running ones stay",
    "uncordon": "allow placing workers on a node again",
    "check": "recount every page, slot, lease and room, and report what doesn't add up",
    "keys": "create, list or revoke API keys in a key file (security.keys_file)",
    "certs": "create, renew or check a cluster's certificates and keys",
    "replay": "replay a recorded trace against an OpenAI endpoint and measure client-side latency",
    "plan": "find the pool sizes that a load needs to meet latency targets, by simulation with measured costs",
    "demo": "run a demo: serve the built-in model under load; --chaos kills, drains and moves workers",
    "sim": "run simulated clusters with faults under a virtual clock, and check every answer",
}
_LAUNCH = ("serve", "doctor")
"""Commands that take the flags of a launch."""
_POOLS = ("add", "scale", "restart", "cordon", "uncordon")
_OTHERS = ("status", "explain", "drain", "undrain", "role", "check", "apply", "upgrade", *_POOLS)
FLAGS = (
    CommandFlag(
        ("--model",),
        _LAUNCH,
        "checkpoint folder, GGUF file, name on the Hugging Face Hub (org/name[@revision]), smollm2, or demo "
        "(default: launch.model)",
        {"metavar": "MODEL"},
    ),
    CommandFlag(
        ("--prefill",),
        _LAUNCH,
        "number of prefill workers (default: pools.prefill, or 1)",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(
        ("--decode",),
        _LAUNCH,
        "number of decode workers (default: pools.decode, or 1)",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(
        ("--colocate",),
        _LAUNCH,
        "number of colocated workers (both roles in one) instead of two pools; 1 if no number is given",
        {"type": int, "nargs": "?", "const": 1, "metavar": "N"},
    ),
    CommandFlag(
        ("--routers",),
        _LAUNCH,
        "number of routers, which share the port (default: launch.routers)",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(("--host",), _LAUNCH, "address that the router listens on (default: launch.host)"),
    CommandFlag(
        ("--port",), _LAUNCH, "port that the router listens on; 0 for any (default: launch.port)", {"type": int}
    ),
    CommandFlag(
        ("--address",),
        ("controller",),
        "this machine's address, for workers, routers and the supervisor",
        {"required": True, "metavar": "HOST"},
    ),
    CommandFlag(("--port",), ("controller",), "port that it listens on", {"type": int, "required": True}),
    CommandFlag(
        ("--standby",),
        ("controller",),
        "stand by even before the first controller (started by serve) has led",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--config",), (*_LAUNCH, "controller"), "YAML file with the configuration", {"type": Path, "metavar": "FILE"}
    ),
    CommandFlag(
        ("--set",),
        (*_LAUNCH, "controller"),
        "set one configuration key; may be repeated",
        {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"},
    ),
    CommandFlag(
        ("--served-model-name",),
        _LAUNCH,
        "model names that clients may use; responses carry the first",
        {"nargs": "+", "default": [], "metavar": "NAME"},
    ),
    CommandFlag(
        ("--ray-address",), _LAUNCH, "join this Ray cluster (auto: the one on this machine)", {"metavar": "ADDR"}
    ),
    CommandFlag(
        ("--detach",),
        ("serve",),
        "start the cluster in the background and exit",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--verbose",),
        ("serve",),
        "show memory plans, kernels and numerics of each worker (later: twinpool status --verbose)",
        {"action": "store_true"},
    ),
    CommandFlag(("--dashboard",), _LAUNCH, "start Ray's dashboard too", {"action": "store_true"}),
    CommandFlag(
        ("worker",),
        ("drain", "undrain"),
        "name of a worker, such as decode-1, or a node's host name or Ray id",
        {"metavar": "WORKER|NODE"},
    ),
    CommandFlag(
        ("--open",),
        _LAUNCH,
        "accept requests without an API key from anyone who can reach --host (security.open)",
        {"action": "store_true"},
    ),
    CommandFlag(("action",), ("keys",), "new, list or revoke", {"choices": ("new", "list", "revoke")}),
    CommandFlag(
        ("name",), ("keys",), "the tenant of a new key, or the id of one to revoke", {"nargs": "?", "default": ""}
    ),
    CommandFlag(
        ("--file",),
        ("keys",),
        "the key file (default: twinpool-keys.json here)",
        {"type": Path, "metavar": "FILE", "default": Path("twinpool-keys.json")},
    ),
    CommandFlag(
        ("--expires",), ("keys",), "how long a new key is valid: 90d, 12h or 30m (default: no expiry)", {"default": ""}
    ),
    CommandFlag(("action",), ("certs",), "new, renew or check", {"choices": ("new", "renew", "check")}),
    CommandFlag(("folder",), ("certs",), "the folder of the files", {"type": Path, "metavar": "DIR"}),
    CommandFlag(
        ("--host",),
        ("certs",),
        "additional host name or address of the endpoint; may be repeated",
        {"action": "append", "default": [], "metavar": "NAME"},
    ),
    CommandFlag(
        ("--days",), ("certs",), "days that the node's certificate is valid", {"type": float, "default": 365.0}
    ),
    CommandFlag(("worker",), ("role",), "name of a worker, such as decode-1", {"metavar": "WORKER"}),
    CommandFlag(("role",), ("role",), "prefill or decode", {"choices": ("prefill", "decode")}),
    CommandFlag(("role",), ("add",), "prefill, decode or colocated", {"choices": ("prefill", "decode", "colocated")}),
    CommandFlag(("--count",), ("add",), "how many", {"type": int, "default": 1, "metavar": "N"}),
    CommandFlag(("--node",), ("add",), "node to start them on, by host name or Ray id (default: any)", {"default": ""}),
    CommandFlag(
        ("sizes",),
        ("scale",),
        "new pool sizes, such as prefill=2 decode=3",
        {"nargs": "+", "metavar": "POOL=N"},
    ),
    CommandFlag(("worker",), ("restart",), "name of a worker, such as decode-1", {"metavar": "WORKER"}),
    CommandFlag(("node",), ("cordon", "uncordon"), "a node's host name or Ray id", {"metavar": "NODE"}),
    CommandFlag(
        ("--no-wait",),
        ("drain", "undrain", "role", "add", "scale", "restart"),
        "return without waiting for completion",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--force",),
        ("drain",),
        "drain even the last worker of its role; after --timeout, restart the remaining requests elsewhere",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--force",), ("role", "restart"), "even if it is the last worker of its role", {"action": "store_true"}
    ),
    CommandFlag(("--force",), ("scale",), "even to no worker of a role", {"action": "store_true"}),
    CommandFlag(
        ("--timeout",),
        ("drain", "undrain", "role", "add", "scale", "restart"),
        "seconds to wait for it",
        {"type": float, "default": 600.0},
    ),
    CommandFlag(
        ("file",),
        ("up", "apply"),
        "YAML file, as for serve --config; its keys replace those of a running cluster",
        {"type": Path, "metavar": "FILE", "nargs": "?"},
        same_as="--config",
        needed=True,
    ),
    CommandFlag(("--config",), ("up", "apply"), "the same as FILE", {"type": Path, "metavar": "FILE"}),
    CommandFlag(
        ("--python",),
        ("upgrade",),
        "virtual environment or interpreter with the new build, at the same path on every node",
        {"type": Path, "required": True, "metavar": "VENV"},
    ),
    CommandFlag(
        ("--dry-run",),
        ("up", "apply", "upgrade"),
        "show what would be done, without doing it",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--force",), ("up", "apply", "upgrade"), "restart even the last worker of a role", {"action": "store_true"}
    ),
    CommandFlag(
        ("--timeout",),
        ("upgrade",),
        "seconds to wait for each worker to restart, and for answers that the new build can't continue",
        {"type": float, "default": 600.0},
    ),
    CommandFlag(
        ("--timeout",),
        ("up", "apply"),
        "seconds to wait for each worker to restart and for pools to reach their size",
        {"type": float, "default": 600.0},
    ),
    CommandFlag(
        ("file",),
        ("doctor",),
        "YAML file, as up takes; --config is the same",
        {"type": Path, "metavar": "FILE", "nargs": "?"},
        same_as="--config",
    ),
    CommandFlag(("--all",), ("doctor",), "also show passed checks", {"action": "store_true"}),
    CommandFlag(
        ("--hosts",),
        ("doctor",),
        "join the Ray cluster of --ray-address briefly and compare its hosts (runs a task on each)",
        {"action": "store_true"},
    ),
    CommandFlag(("--watch",), ("drain",), "show progress live", {"action": "store_true"}),
    CommandFlag(
        ("request",),
        ("explain",),
        "response id (with or without its prefix), or x-request-id",
        {"metavar": "REQUEST_ID"},
    ),
    CommandFlag(("--all",), ("status",), "one row per worker, without folding similar ones", {"action": "store_true"}),
    CommandFlag(
        ("--verbose",),
        ("status",),
        "also show kernels, numerics and memory plans of the workers",
        {"action": "store_true"},
    ),
    CommandFlag(("--watch",), ("status",), "refresh until Ctrl-C", {"action": "store_true"}),
    CommandFlag(
        ("--json",),
        ("status", "explain", "check", "drain", "doctor"),
        "print JSON",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--seed",),
        ("sim",),
        "replay one seed and print its log; with --requests, the random seed (0)",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(("--seeds",), ("sim",), "range of seeds to run", {"metavar": "A..B"}),
    CommandFlag(("--jobs",), ("sim",), "number of parallel processes", {"type": int, "default": 1, "metavar": "N"}),
    CommandFlag(("--first",), ("sim",), "stop at the first seed with a violation", {"action": "store_true"}),
    CommandFlag(("--colocate",), ("sim",), "colocated workers instead of two pools", {"action": "store_true"}),
    CommandFlag(
        ("--conditional",),
        ("sim",),
        "two pools, with decode workers that may compute prompts too",
        {"action": "store_true"},
    ),
    CommandFlag(("--shrink",), ("sim",), "reduce a failing seed before showing it", {"action": "store_true"}),
    CommandFlag(
        ("--requests",),
        ("sim",),
        "simulate N requests on modelled workers without faults, and show latencies",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(("--workers",), ("sim",), "with --requests: workers of both pools (8)", {"type": int, "metavar": "N"}),
    CommandFlag(
        ("--seconds",),
        ("sim",),
        "with --requests: virtual seconds over which they arrive (3600; with --replay, as in the trace)",
        {"type": float, "metavar": "S"},
    ),
    CommandFlag(
        ("--policy",),
        ("sim",),
        "with --requests: router.policy (cache_aware)",
        {"choices": ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")},
    ),
    CommandFlag(
        ("--trace",),
        ("sim",),
        "with --requests: trace file to take request lengths from",
        {"type": Path, "metavar": "FILE"},
    ),
    CommandFlag(
        ("--replay",),
        ("sim",),
        "with --trace: replay the trace's first --requests requests as recorded",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--url",),
        ("down",),
        "URL of the cluster's router (default: TWINPOOL_URL, else the only cluster on this machine)",
        {"default": ""},
    ),
    CommandFlag(
        ("--url",),
        _OTHERS,
        "URL of the router (default: TWINPOOL_URL, else the only cluster here; read-only: the newest)",
        {},
    ),
    CommandFlag(
        ("--ca",),
        _OTHERS,
        "CA file to verify the router with (default: TWINPOOL_CA, else the running cluster's, else the system's)",
        {"default": "", "metavar": "FILE"},
    ),
    CommandFlag(
        ("--chaos",), ("demo",), "kill, stop, drain and move workers during the demo", {"action": "store_true"}
    ),
    CommandFlag(
        ("--minutes",),
        ("demo",),
        "duration; 0: until Ctrl-C (default: 2)",
        {"type": float, "default": 2.0, "metavar": "N"},
    ),
    CommandFlag(
        ("--port",), ("demo",), "port of the endpoint; 0 for any (default: 8000)", {"type": int, "default": 8000}
    ),
    CommandFlag(("--seed",), ("demo",), "random seed of prompts and faults", {"type": int, "default": 1}),
    *REPLAY_FLAGS,
    *PLAN_FLAGS,
)


def parser() -> CommandParser:
    """Return the parser of the command line, made from `COMMANDS` and `FLAGS`."""
    top = CommandParser(
        prog="twinpool", description="Serve language models with prefill and decode on separate workers."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, text in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parsers[name].take([flag for flag in FLAGS if name in flag.commands])
    top.have(parsers)
    return top
