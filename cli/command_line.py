"""The commands of `twinpool`: of each its name, its help, its flags and its function, and the parser made of them.

The functions take what the parser read and return the exit code. Their modules import what is heavy when they run, as
this module is imported before every command.
"""

from __future__ import annotations

from pathlib import Path

from twinpool.cli import credential_commands, launch_commands
from twinpool.cli.command_parser import (
    CommandFlag,
    CommandParser,
    command,
    command_table,
    count,
    file_flag,
    flag,
    switch,
)
from twinpool.cli.load import batch_command
from twinpool.cli.operator import (
    apply_command,
    drain_command,
    explain_command,
    pool_commands,
    status_command,
    upgrade_command,
)

# ------------------------------------------------------------ flags of several commands

_POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")
_JSON = switch("--json", "print JSON")
_NO_WAIT = switch("--no-wait", "return without waiting for completion")
_TIMEOUT = flag("--timeout", "seconds to wait for it", type=float, default=600.0)
_DRY_RUN = switch("--dry-run", "show what would be done, without doing it")
_FORCE = switch("--force", "restart even the last worker of a role")
_FORCE_LAST = switch("--force", "even if it is the last worker of its role")
_WORKER = flag("worker", "name of a worker, such as decode-1", metavar="WORKER")
_WORKER_OR_NODE = flag("worker", "name of a worker (decode-1), or a node's host name or Ray id", metavar="WORKER|NODE")
_NODE = flag("node", "a node's host name or Ray id", metavar="NODE")
_CONFIG = file_flag("--config", "YAML file with the configuration")
_SET = flag(
    "--set", "set one configuration key; may be repeated", action="append", default=[], metavar="SECTION.KEY=VALUE"
)
_LIMIT = count("--limit", "use only the first N requests")
_SPEED = flag("--speed", "speed-up factor for the trace (1)", type=float, default=1.0)
_MAX_CONTEXT = flag("--max-context", "truncate requests to this many tokens in total", type=int, metavar="TOKENS")


def _trace_place(*, needed: bool) -> CommandFlag:
    """The trace that a command reads, as `FILE` instead of `--trace FILE`. `needed`: whether it must be given."""
    return file_flag("file", "the same as --trace FILE", nargs="?", same_as="--trace", needed=needed)


_LAUNCH = (
    flag(
        "--model",
        "checkpoint folder, GGUF file, name on the Hugging Face Hub (org/name[@revision]), smollm2, or demo "
        "(default: launch.model)",
        metavar="MODEL",
    ),
    count("--prefill", "number of prefill workers (default: pools.prefill, or 1)"),
    count("--decode", "number of decode workers (default: pools.decode, or 1)"),
    flag(
        "--colocate",
        "number of colocated workers (both roles in one) instead of two pools; 1 if no number is given",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
    ),
    count("--routers", "number of routers, which share the port (default: launch.routers)"),
    flag("--host", "address that the router listens on (default: launch.host)"),
    flag("--port", "port that the router listens on; 0 for any (default: launch.port)", type=int),
    _CONFIG,
    _SET,
    flag(
        "--served-model-name",
        "model names that clients may use; responses carry the first",
        nargs="+",
        default=[],
        metavar="NAME",
    ),
    flag("--ray-address", "join this Ray cluster (auto: the one on this machine)", metavar="ADDR"),
    switch("--dashboard", "start Ray's dashboard too"),
    switch("--open", "accept requests without an API key from anyone who can reach --host (security.open)"),
)
"""Of a launch."""
_SETTINGS = (
    file_flag(
        "file",
        "YAML file, as for serve --config; its keys replace those of a running cluster",
        nargs="?",
        same_as="--config",
        needed=True,
    ),
    file_flag("--config", "the same as FILE"),
    _DRY_RUN,
    _FORCE,
    flag(
        "--timeout",
        "seconds to wait for each worker to restart and for pools to reach their size",
        type=float,
        default=600.0,
    ),
)
"""Of what brings a cluster to what a file says."""
_CLUSTER = (
    flag("--url", "URL of the router (default: TWINPOOL_URL, else the only cluster here; read-only: the newest)"),
    flag(
        "--ca",
        "CA file to verify the router with (default: TWINPOOL_CA, else the running cluster's, else the system's)",
        default="",
        metavar="FILE",
    ),
    flag("--model-name", "the model that it is about, where the endpoint serves several", default="", metavar="NAME"),
)
"""Of what asks a cluster's router."""

# ------------------------------------------------------------ the commands

COMMANDS = command_table(
    command(
        "serve",
        "start a cluster and serve a model",
        launch_commands.serve,
        *_LAUNCH,
        switch("--detach", "start the cluster in the background and exit"),
        switch(
            "--verbose", "show memory plans, kernels and numerics of each worker (later: twinpool status --verbose)"
        ),
    ),
    command(
        "up",
        "launch a detached cluster from a file, or bring a running one to what the file says",
        launch_commands.up,
        *_SETTINGS,
    ),
    command(
        "doctor",
        "check for problems before running serve or up with the same flags or file",
        launch_commands.doctor,
        *_LAUNCH,
        file_flag("file", "YAML file, as up takes; --config is the same", nargs="?", same_as="--config"),
        switch("--all", "also show passed checks"),
        switch("--hosts", "join the Ray cluster of --ray-address briefly and compare its hosts (runs a task on each)"),
        _JSON,
    ),
    command(
        "controller",
        "run a controller of a cluster; with several, one leads and the others stand by",
        launch_commands.controller,
        flag(
            "--address",
            "this machine's address, for workers, routers and the supervisor",
            required=True,
            metavar="HOST",
        ),
        flag("--port", "port that it listens on", type=int, required=True),
        switch("--standby", "stand by even before the first controller (started by serve) has led"),
        _CONFIG,
        _SET,
    ),
    command(
        "down",
        "shut down a detached cluster",
        launch_commands.down,
        _CLUSTER[0],
    ),
    command(
        "status",
        "show workers, load and the autoscaler's decisions",
        status_command.status,
        switch("--all", "one row per worker, without folding similar ones"),
        switch("--verbose", "also show kernels, numerics and memory plans of the workers"),
        switch("--watch", "refresh until Ctrl-C"),
        _JSON,
        *_CLUSTER,
    ),
    command(
        "explain",
        "show a request's timeline: where its time went, and why it was placed where it ran",
        explain_command.explain,
        flag("request", "response id (with or without its prefix), or x-request-id", metavar="REQUEST_ID"),
        _JSON,
        *_CLUSTER,
    ),
    command(
        "drain",
        "stop admitting requests on a worker or node, finish or migrate its work, then stop it",
        drain_command.drain,
        _WORKER_OR_NODE,
        _NO_WAIT,
        switch(
            "--force",
            "drain even the last worker of its role; after --timeout, restart the remaining requests elsewhere",
        ),
        _TIMEOUT,
        switch("--watch", "show progress live"),
        _JSON,
        *_CLUSTER,
    ),
    command(
        "undrain",
        "let a draining worker or node admit requests again; restart workers that have stopped",
        pool_commands.undrain,
        _WORKER_OR_NODE,
        _NO_WAIT,
        _TIMEOUT,
        *_CLUSTER,
    ),
    command(
        "role",
        "move a worker to the other pool: drain it and start it in the new role",
        drain_command.role,
        _WORKER,
        flag("role", "prefill or decode", choices=("prefill", "decode")),
        _NO_WAIT,
        _FORCE_LAST,
        _TIMEOUT,
        *_CLUSTER,
    ),
    command(
        "add",
        "add workers to a pool, optionally on a given node",
        pool_commands.add,
        flag("role", "prefill, decode or colocated", choices=("prefill", "decode", "colocated")),
        flag("--count", "how many", type=int, default=1, metavar="N"),
        flag("--node", "node to start them on, by host name or Ray id (default: any)", default=""),
        _NO_WAIT,
        _TIMEOUT,
        *_CLUSTER,
    ),
    command(
        "scale",
        "resize pools: start or drain workers as needed",
        pool_commands.scale,
        flag("sizes", "new pool sizes, such as prefill=2 decode=3", nargs="+", metavar="POOL=N"),
        _NO_WAIT,
        switch("--force", "even to no worker of a role"),
        _TIMEOUT,
        *_CLUSTER,
    ),
    command(
        "restart",
        "drain a worker and start it again",
        pool_commands.restart,
        _WORKER,
        _NO_WAIT,
        _FORCE_LAST,
        _TIMEOUT,
        *_CLUSTER,
    ),
    command(
        "apply",
        "change settings and pool sizes of a running cluster, restarting workers one by one where needed",
        apply_command.apply,
        *_SETTINGS,
        *_CLUSTER,
    ),
    command(
        "upgrade",
        "upgrade a running detached cluster to another build without downtime",
        upgrade_command.upgrade,
        flag(
            "--python",
            "virtual environment or interpreter with the new build, at the same path on every node",
            type=Path,
            required=True,
            metavar="VENV",
        ),
        _DRY_RUN,
        _FORCE,
        flag(
            "--timeout",
            "seconds to wait for each worker to restart, and for answers that the new build can't continue",
            type=float,
            default=600.0,
        ),
        *_CLUSTER,
    ),
    command("cordon", "stop placing new workers on a node; running ones stay", pool_commands.cordon, _NODE, *_CLUSTER),
    command("uncordon", "allow placing workers on a node again", pool_commands.cordon, _NODE, *_CLUSTER),
    command(
        "adapters",
        "list the adapters (LoRA) that are served, load one more, or drop one",
        pool_commands.adapters,
        flag("action", "list, load or unload", choices=("list", "load", "unload")),
        flag("name", "by which requests choose the adapter to load or unload", nargs="?", default=""),
        flag("path", "its folder, below adapters.roots, as the cluster's machines name it", nargs="?", default=""),
        switch("--replace", "load it in place of another adapter of that name"),
        _JSON,
        *_CLUSTER,
    ),
    *(*pool_commands.serving_commands(_NO_WAIT, _TIMEOUT, *_CLUSTER), *launch_commands.picker_commands()),
    command(
        "check",
        "recount every page, slot, lease and room, and report what doesn't add up",
        status_command.check,
        _JSON,
        *_CLUSTER,
    ),
    command(
        "keys",
        "create, list or revoke API keys in a key file (security.keys_file)",
        credential_commands.keys,
        flag("action", "new, list or revoke", choices=("new", "list", "revoke")),
        flag("name", "the tenant of a new key, or the id of one to revoke", nargs="?", default=""),
        file_flag("--file", "the key file (default: twinpool-keys.json here)", default=Path("twinpool-keys.json")),
        flag("--expires", "how long a new key is valid: 90d, 12h or 30m (default: no expiry)", default=""),
    ),
    command(
        "certs",
        "create, renew or check a cluster's certificates and keys",
        credential_commands.certs,
        flag("action", "new, renew or check", choices=("new", "renew", "check")),
        flag("folder", "the folder of the files", type=Path, metavar="DIR"),
        flag(
            "--host",
            "additional host name or address of the endpoint; may be repeated",
            action="append",
            default=[],
            metavar="NAME",
        ),
        flag("--days", "days that the node's certificate is valid", type=float, default=365.0),
    ),
    command(
        "replay",
        "replay a recorded trace against an OpenAI endpoint and measure client-side latency",
        launch_commands.replay,
        _trace_place(needed=True),
        file_flag("--trace", "JSONL file of a trace, in Mooncake's format"),
        flag("--url", "an OpenAI endpoint: http://HOST:PORT, Twinpool's or any other", required=True),
        flag("--model", "model name to send (default: the first that the server lists)", default=""),
        _SPEED,
        _LIMIT,
        flag("--seconds", "use only requests of the first S seconds of playback", type=float, metavar="S"),
        flag(
            "--concurrency",
            "maximum concurrent requests; waiting beyond it counts as latency (1024)",
            type=int,
            default=1024,
            metavar="N",
        ),
        flag("--scale-lengths", "multiply the trace's lengths, blocks with them (1)", type=float, default=1.0),
        _MAX_CONTEXT,
        switch("--chat", "use /v1/chat/completions, with text"),
        switch("--text", "send text, not token ids, for servers that take no ids"),
        flag("--token-range", "token ids to make prompts of, LOW:HIGH (300:2000)", default="300:2000"),
        flag("--seed", "random seed; another seed gives prompts that no cache holds", type=int, default=1),
        file_flag(
            "--keys", "file with an API key a line, taken in turn (default: the one in TWINPOOL_API_KEY, if any)"
        ),
        flag("--extra", "JSON to add to each request's body; null leaves a field out", default="{}"),
        flag("--timeout", "seconds before a request is abandoned", type=float, default=600.0),
        flag(
            "--slo",
            "latency targets in seconds: ttft to the first token, itl between tokens on average (ttft=5,itl=0.1)",
            default="ttft=5,itl=0.1",
            metavar="ttft=S,itl=S",
        ),
        file_flag("--json", "write settings and figures to a file"),
        switch("--records", "with --json: include each request"),
        flag("--plots", "draw figures into a folder (needs twinpool[plots])", type=Path, metavar="FOLDER"),
    ),
    command(
        "plan",
        "find the pool sizes that a load needs to meet latency targets, by simulation with measured costs",
        launch_commands.plan,
        _trace_place(needed=False),
        file_flag("--trace", "JSONL file of a trace, as replay takes"),
        flag(
            "--slo",
            "latency targets in seconds, as for replay (ttft=5,itl=0.1)",
            default="ttft=5,itl=0.1",
            metavar="ttft=S,itl=S",
        ),
        flag("--share", "share of requests that must meet the targets (0.99)", type=float, default=0.99),
        flag(
            "--costs",
            "file of measured costs, written by --measure (twinpool-costs.json)",
            type=Path,
            metavar="FILE",
            default=Path("twinpool-costs.json"),
        ),
        switch("--measure", "measure the costs first, for about a minute"),
        flag("--url", "with --measure: an idle cluster (default: start one worker of each role here)", default=""),
        switch(
            "--memory",
            "show the memory of the weights of --model: a folder, a GGUF file, or a config.json without a checkpoint",
        ),
        flag(
            "--cards",
            "with --memory: the GPUs, one a rank, by name or memory (8xH100, 8x80GiB; default: a CPU)",
            default="",
            metavar="NxCARD",
        ),
        flag(
            "--model",
            "with --measure: the model to start, as serve takes it (demo); with --memory: its path",
            default="",
        ),
        file_flag("--config", "with --measure or --memory: YAML file, as serve takes it"),
        flag(
            "--set",
            "with --measure or --memory: set one configuration key; may be repeated",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
        ),
        flag("--token-range", "with --measure: token ids to make prompts of (300:2000)", default="300:2000"),
        _SPEED,
        _LIMIT,
        flag("--scale-lengths", "multiply the trace's lengths (1)", type=float, default=1.0),
        _MAX_CONTEXT,
        flag("--max-workers", "maximum workers per pool (64)", type=int, default=64, metavar="N"),
        flag("--policy", "router.policy (cache_aware)", choices=_POLICIES, default="cache_aware"),
        file_flag("--json", "write the plan to a file"),
    ),
    command(
        "convert",
        "write a checkpoint's weights in another format, to a new folder of safetensors",
        launch_commands.convert,
        flag("source", "folder, GGUF file or name of a model, as serve takes it", metavar="SOURCE"),
        flag("target", "folder to write, which must not be there", type=Path, metavar="TARGET"),
        flag(
            "--weights",
            "bfloat16 (dequantised), float8 (e4m3 in blocks of 128 x 128), int8, int4, nvfp4, mxfp4 or mxfp8 "
            "(compressed-tensors), awq, gptq4 or gptq8",
            choices=("bfloat16", "float8", "int8", "int4", "nvfp4", "mxfp4", "mxfp8", "awq", "gptq4", "gptq8"),
            required=True,
        ),
        flag(
            "--group-size",
            "columns that share a scale in int8, int4, awq and gptq (128); layers that it doesn't divide stay dense",
            type=int,
            choices=(32, 64, 128),
            default=128,
        ),
    ),
    command(
        "batch",
        "submit a file of requests as a batch, wait for it, and write the answers (1: not all are answered)",
        batch_command.batch,
        file_flag("file", "JSON lines with custom_id, method, url and body"),
        file_flag("--output", "where the answers go (FILE.answers.jsonl); failed ones to OUTPUT.errors"),
        flag("--window", "how long the batch may take (24h)", default="24h"),
        *_CLUSTER,
    ),
    command(
        "demo",
        "run a demo: serve the built-in model under load; --chaos kills, drains and moves workers",
        launch_commands.demo,
        switch("--chaos", "kill, stop, drain and move workers during the demo"),
        flag("--minutes", "duration; 0: until Ctrl-C (default: 2)", type=float, default=2.0, metavar="N"),
        flag("--port", "port of the endpoint; 0 for any (default: 8000)", type=int, default=8000),
        flag("--seed", "random seed of prompts and faults", type=int, default=1),
    ),
    command(
        "sim",
        "run simulated clusters with faults under a virtual clock, and check every answer",
        launch_commands.sim,
        count("--seed", "replay one seed and print its log; with --requests, the random seed (0)"),
        flag("--seeds", "range of seeds to run", metavar="A..B"),
        flag("--jobs", "number of parallel processes", type=int, default=1, metavar="N"),
        switch("--first", "stop at the first seed with a violation"),
        switch("--colocate", "colocated workers instead of two pools"),
        switch("--conditional", "two pools, with decode workers that may compute prompts too"),
        switch("--shrink", "reduce a failing seed before showing it"),
        count("--requests", "simulate N requests on modelled workers without faults, and show latencies"),
        count("--workers", "with --requests: workers of both pools (8)"),
        flag(
            "--seconds",
            "with --requests: virtual seconds over which they arrive (3600; with --replay, as in the trace)",
            type=float,
            metavar="S",
        ),
        flag("--policy", "with --requests: router.policy (cache_aware)", choices=_POLICIES),
        file_flag("--trace", "with --requests: trace file to take request lengths from"),
        switch("--replay", "with --trace: replay the trace's first --requests requests as recorded"),
    ),
)


def parser() -> CommandParser:
    """Return the parser of the command line, made from `COMMANDS`."""
    top = CommandParser(
        prog="twinpool", description="Serve language models with prefill and decode on separate workers."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, one in COMMANDS.items():
        text = one.help
        parsers[name] = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parsers[name].take(one.flags)
    top.have(parsers)
    return top
