"""The flags of `twinpool replay`."""

from __future__ import annotations

from pathlib import Path

from twinpool.cli.command_flag import CommandFlag, trace_flags

_ONE = ("replay",)
REPLAY_FLAGS = (
    *trace_flags("replay", "JSONL file of a trace, in Mooncake's format", needed=True),
    CommandFlag(("--url",), _ONE, "an OpenAI endpoint: http://HOST:PORT, Twinpool's or any other", {"required": True}),
    CommandFlag(("--model",), _ONE, "model name to send (default: the first that the server lists)", {"default": ""}),
    CommandFlag(("--speed",), _ONE, "speed-up factor for the trace (1)", {"type": float, "default": 1.0}),
    CommandFlag(("--limit",), _ONE, "use only the first N requests", {"type": int, "metavar": "N"}),
    CommandFlag(
        ("--seconds",), _ONE, "use only requests of the first S seconds of playback", {"type": float, "metavar": "S"}
    ),
    CommandFlag(
        ("--concurrency",),
        _ONE,
        "maximum concurrent requests; waiting beyond it counts as latency (1024)",
        {"type": int, "default": 1024, "metavar": "N"},
    ),
    CommandFlag(
        ("--scale-lengths",),
        _ONE,
        "multiply the trace's lengths, blocks with them (1)",
        {"type": float, "default": 1.0},
    ),
    CommandFlag(
        ("--max-context",), _ONE, "truncate requests to this many tokens in total", {"type": int, "metavar": "TOKENS"}
    ),
    CommandFlag(("--chat",), _ONE, "use /v1/chat/completions, with text", {"action": "store_true"}),
    CommandFlag(("--text",), _ONE, "send text, not token ids, for servers that take no ids", {"action": "store_true"}),
    CommandFlag(("--token-range",), _ONE, "token ids to make prompts of, LOW:HIGH (300:2000)", {"default": "300:2000"}),
    CommandFlag(
        ("--seed",), _ONE, "random seed; another seed gives prompts that no cache holds", {"type": int, "default": 1}
    ),
    CommandFlag(
        ("--keys",),
        _ONE,
        "file with an API key a line, taken in turn (default: the one in TWINPOOL_API_KEY, if any)",
        {"type": Path, "metavar": "FILE"},
    ),
    CommandFlag(("--extra",), _ONE, "JSON to add to each request's body; null leaves a field out", {"default": "{}"}),
    CommandFlag(("--timeout",), _ONE, "seconds before a request is abandoned", {"type": float, "default": 600.0}),
    CommandFlag(
        ("--slo",),
        _ONE,
        "latency targets in seconds: ttft to the first token, itl between tokens on average (ttft=5,itl=0.1)",
        {"default": "ttft=5,itl=0.1", "metavar": "ttft=S,itl=S"},
    ),
    CommandFlag(("--json",), _ONE, "write settings and figures to a file", {"type": Path, "metavar": "FILE"}),
    CommandFlag(("--records",), _ONE, "with --json: include each request", {"action": "store_true"}),
    CommandFlag(
        ("--plots",), _ONE, "draw figures into a folder (needs twinpool[plots])", {"type": Path, "metavar": "FOLDER"}
    ),
)
