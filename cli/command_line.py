"""The command line of `twinpool`: its subcommands, their flags, and the parser that is made of both."""

from __future__ import annotations

from pathlib import Path

from twinpool.cli.command_flag import CommandFlag
from twinpool.cli.command_parser import CommandParser
from twinpool.cli.plan.plan_flags import PLAN_FLAGS
from twinpool.cli.replay.replay_flags import REPLAY_FLAGS

COMMANDS = {
    "serve": "start a cluster and serve a model",
    "up": "launch the cluster that a file describes, detached; where it runs, bring it to what the file says now",
    "doctor": "look for what would go wrong before serve or up is run with the same flags or file",
    "controller": "be a controller of a cluster: lead, or stand by until the one that leads is gone",
    "down": "end the cluster of this machine, or of several the one of --url",
    "status": "show the workers, and what the autoscaler does",
    "explain": "say what became of a request, or what it does now: where its time went, and why it ran where it did",
    "drain": "stop a worker's admission, or a node's; hand its work on or finish it, and wait until it has left",
    "undrain": "have a draining worker or node admit again, and start again what has left",
    "role": "drain a worker and start it in the other pool",
    "add": "start workers more, on any node or on one",
    "scale": "bring pools to so many workers, by starts and by drains",
    "restart": "drain a worker and start it again",
    "apply": "change settings and pool sizes of a running cluster, by restarts one by one where workers must",
    "upgrade": "have a detached cluster of this machine go on in another build, while it serves",
    "cordon": "place no worker on a node any more; those that serve there go on",
    "uncordon": "let workers be placed on a node again",
    "check": "recount every page, slot, lease and room, and name what is wrong",
    "keys": "make, list or revoke API keys in a key file (security.keys_file)",
    "certs": "make, renew or check the certificates and keys of a cluster of your own",
    "replay": "send a trace's requests to an OpenAI endpoint, as they came once, and measure what clients see",
    "plan": "say what pools a load needs to keep latency targets, by measured costs and a simulated cluster",
    "demo": "show what this is: serve the built-in model, ask it on and on, and with --chaos kill and drain workers",
    "sim": "run simulated clusters under a virtual clock, with faults, and check every answer",
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
        "number of colocated workers, which have both roles, instead of two pools; 1 without a number",
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
        "this machine's address, at which workers, routers and the supervisor reach the controller",
        {"required": True, "metavar": "HOST"},
    ),
    CommandFlag(("--port",), ("controller",), "port that it listens on", {"type": int, "required": True}),
    CommandFlag(
        ("--standby",),
        ("controller",),
        "wait also while no controller has led this cluster yet: serve starts the first",
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
        "names under which clients ask for the model; answers carry the first",
        {"nargs": "+", "default": [], "metavar": "NAME"},
    ),
    CommandFlag(
        ("--ray-address",), _LAUNCH, "join this Ray cluster (auto: the one on this machine)", {"metavar": "ADDR"}
    ),
    CommandFlag(
        ("--detach",),
        ("serve",),
        "start the cluster and end: it goes on without this command",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--verbose",),
        ("serve",),
        "show how nodes are divided, what each worker holds and computes with (else: twinpool status --verbose)",
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
        "let everybody ask who reaches --host, without a key (security.open)",
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
        ("--expires",), ("keys",), "how long a new key is valid: 90d, 12h or 30m (default: for ever)", {"default": ""}
    ),
    CommandFlag(("action",), ("certs",), "new, renew or check", {"choices": ("new", "renew", "check")}),
    CommandFlag(("folder",), ("certs",), "the folder of the files", {"type": Path, "metavar": "DIR"}),
    CommandFlag(
        ("--host",),
        ("certs",),
        "a name or address that the endpoint is reached by, beside this machine's; may be repeated",
        {"action": "append", "default": [], "metavar": "NAME"},
    ),
    CommandFlag(
        ("--days",), ("certs",), "days that the node's certificate is valid", {"type": float, "default": 365.0}
    ),
    CommandFlag(("worker",), ("role",), "name of a worker, such as decode-1", {"metavar": "WORKER"}),
    CommandFlag(("role",), ("role",), "prefill or decode", {"choices": ("prefill", "decode")}),
    CommandFlag(("role",), ("add",), "prefill, decode or colocated", {"choices": ("prefill", "decode", "colocated")}),
    CommandFlag(("--count",), ("add",), "how many", {"type": int, "default": 1, "metavar": "N"}),
    CommandFlag(("--node",), ("add",), "the one node that they are to run on, by host name or Ray id", {"default": ""}),
    CommandFlag(
        ("sizes",),
        ("scale",),
        "prefill=2 decode=3: workers that the pools are to have",
        {"nargs": "+", "metavar": "POOL=N"},
    ),
    CommandFlag(("worker",), ("restart",), "name of a worker, such as decode-1", {"metavar": "WORKER"}),
    CommandFlag(("node",), ("cordon", "uncordon"), "a node's host name or Ray id", {"metavar": "NODE"}),
    CommandFlag(
        ("--no-wait",),
        ("drain", "undrain", "role", "add", "scale", "restart"),
        "don't wait until it is done",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--force",),
        ("drain",),
        "drain even the last worker of its role; after --timeout start over elsewhere what is left",
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
        "YAML file, as serve --config takes; of a cluster that runs its keys replace the cluster's",
        {"type": Path, "metavar": "FILE", "nargs": "?"},
        same_as="--config",
        needed=True,
    ),
    CommandFlag(("--config",), ("up", "apply"), "the same as FILE", {"type": Path, "metavar": "FILE"}),
    CommandFlag(
        ("--python",),
        ("upgrade",),
        "virtual environment, or interpreter, that the build is installed in, at the same place on every node",
        {"type": Path, "required": True, "metavar": "VENV"},
    ),
    CommandFlag(
        ("--dry-run",), ("up", "apply", "upgrade"), "say what it would do, and change nothing", {"action": "store_true"}
    ),
    CommandFlag(
        ("--force",), ("up", "apply", "upgrade"), "restart even the last worker of a role", {"action": "store_true"}
    ),
    CommandFlag(
        ("--timeout",),
        ("upgrade",),
        "seconds to wait for each worker that restarts: for answers, too, that none of the new build can go on with",
        {"type": float, "default": 600.0},
    ),
    CommandFlag(
        ("--timeout",),
        ("up", "apply"),
        "seconds to wait for each worker that restarts, and for pools that change their size",
        {"type": float, "default": 600.0},
    ),
    CommandFlag(
        ("file",),
        ("doctor",),
        "YAML file, as up takes; --config is the same",
        {"type": Path, "metavar": "FILE", "nargs": "?"},
        same_as="--config",
    ),
    CommandFlag(("--all",), ("doctor",), "show what is fine, too", {"action": "store_true"}),
    CommandFlag(
        ("--hosts",),
        ("doctor",),
        "join the Ray of --ray-address for a moment, and compare its hosts: a task runs on each",
        {"action": "store_true"},
    ),
    CommandFlag(("--watch",), ("drain",), "show what it waits for, live", {"action": "store_true"}),
    CommandFlag(
        ("request",),
        ("explain",),
        "the id of its answer, with or without what the endpoint puts before it, or its x-request-id",
        {"metavar": "REQUEST_ID"},
    ),
    CommandFlag(
        ("--all",), ("status",), "a row for each worker, of alike ones in a long table, too", {"action": "store_true"}
    ),
    CommandFlag(
        ("--verbose",),
        ("status",),
        "say what the workers compute with, too, and how nodes were divided at the start",
        {"action": "store_true"},
    ),
    CommandFlag(("--watch",), ("status",), "show them live, until Ctrl-C", {"action": "store_true"}),
    CommandFlag(
        ("--json",),
        ("status", "explain", "check", "drain", "doctor"),
        "print JSON",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--seed",),
        ("sim",),
        "replay one seed, with its log; with --requests, what is drawn (0)",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(("--seeds",), ("sim",), "run many, the first to the last", {"metavar": "A..B"}),
    CommandFlag(("--jobs",), ("sim",), "processes that run seeds", {"type": int, "default": 1, "metavar": "N"}),
    CommandFlag(("--first",), ("sim",), "of many, stop at the first that violates something", {"action": "store_true"}),
    CommandFlag(("--colocate",), ("sim",), "colocated workers instead of two pools", {"action": "store_true"}),
    CommandFlag(
        ("--conditional",),
        ("sim",),
        "two pools, of which decode workers compute prompts, too",
        {"action": "store_true"},
    ),
    CommandFlag(("--shrink",), ("sim",), "make a failing seed smaller before it is shown", {"action": "store_true"}),
    CommandFlag(
        ("--requests",),
        ("sim",),
        "instead, simulate so many requests over modelled workers, without faults, and show what they came to",
        {"type": int, "metavar": "N"},
    ),
    CommandFlag(("--workers",), ("sim",), "with --requests: workers of both pools (8)", {"type": int, "metavar": "N"}),
    CommandFlag(
        ("--seconds",),
        ("sim",),
        "with --requests: virtual time in which they come (3600; with --replay the trace's own)",
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
        "with --requests: a file of a trace, whose lengths they have",
        {"type": Path, "metavar": "FILE"},
    ),
    CommandFlag(
        ("--replay",),
        ("sim",),
        "with --trace: its own requests, the first --requests of them",
        {"action": "store_true"},
    ),
    CommandFlag(
        ("--url",),
        ("down",),
        "the router of the cluster (default: TWINPOOL_URL, else the one cluster here)",
        {"default": ""},
    ),
    CommandFlag(
        ("--url",), _OTHERS, "the router (default: TWINPOOL_URL, else the one cluster here; to look, the newest)", {}
    ),
    CommandFlag(
        ("--ca",),
        _OTHERS,
        "file of certificates by which the router's is checked (default: TWINPOOL_CA, else what serve says, or the "
        "system's)",
        {"default": "", "metavar": "FILE"},
    ),
    CommandFlag(("--chaos",), ("demo",), "kill, stop, drain and move workers meanwhile", {"action": "store_true"}),
    CommandFlag(
        ("--minutes",),
        ("demo",),
        "how long; 0: until Ctrl-C (default: 2)",
        {"type": float, "default": 2.0, "metavar": "N"},
    ),
    CommandFlag(
        ("--port",), ("demo",), "the endpoint's port; 0: a free one (default: 8000)", {"type": int, "default": 8000}
    ),
    CommandFlag(("--seed",), ("demo",), "of questions and strikes", {"type": int, "default": 1}),
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
