"""The flags of `twinpool replay`."""

from __future__ import annotations

from pathlib import Path

from twinpool.cli.command_flag import CommandFlag, trace_flags

_ONE = ("replay",)
REPLAY_FLAGS = (
    *trace_flags("replay", "JSONL file of a trace, in Mooncake's format", needed=True),
    CommandFlag(("--url",), _ONE, "an OpenAI endpoint: http://HOST:PORT, Twinpool's or any other", {"required": True}),
    CommandFlag(("--model",), _ONE, "model name to send (default: the first that the server lists)", {"default": ""}),
    CommandFlag(("--speed",), _ONE, "play the trace this much faster (1)", {"type": float, "default": 1.0}),
    CommandFlag(("--limit",), _ONE, "the first N requests only", {"type": int, "metavar": "N"}),
    CommandFlag(
        ("--seconds",), _ONE, "the requests of the first S seconds, as they are played", {"type": float, "metavar": "S"}
    ),
    CommandFlag(
        ("--concurrency",),
        _ONE,
        "the most requests under way; one that is due beyond it waits, which counts as the endpoint's time (1024)",
        {"type": int, "default": 1024, "metavar": "N"},
    ),
    CommandFlag(
        ("--scale-lengths",),
        _ONE,
        "multiply the trace's lengths, blocks with them (1)",
        {"type": float, "default": 1.0},
    ),
    CommandFlag(("--max-context",), _ONE, "cut requests to so many tokens in all", {"type": int, "metavar": "TOKENS"}),
    CommandFlag(("--chat",), _ONE, "ask /v1/chat/completions, with text", {"action": "store_true"}),
    CommandFlag(("--text",), _ONE, "send text, not token ids, for servers that take no ids", {"action": "store_true"}),
    CommandFlag(("--token-range",), _ONE, "token ids to make prompts of, LOW:HIGH (300:2000)", {"default": "300:2000"}),
    CommandFlag(("--seed",), _ONE, "another seed makes other prompts, which no cache has", {"type": int, "default": 1}),
    CommandFlag(
        ("--keys",),
        _ONE,
        "file with an API key a line, taken in turn (default: the one in TWINPOOL_API_KEY, if any)",
        {"type": Path, "metavar": "FILE"},
    ),
    CommandFlag(("--extra",), _ONE, "JSON to add to each request's body; null leaves a field out", {"default": "{}"}),
    CommandFlag(("--timeout",), _ONE, "seconds after which a request is given up", {"type": float, "default": 600.0}),
    CommandFlag(
        ("--slo",),
        _ONE,
        "what a good answer keeps, in seconds: ttft to its first token, itl from token to token on its average "
        "(ttft=5,itl=0.1)",
        {"default": "ttft=5,itl=0.1", "metavar": "ttft=S,itl=S"},
    ),
    CommandFlag(("--json",), _ONE, "write settings and figures to a file", {"type": Path, "metavar": "FILE"}),
    CommandFlag(("--records",), _ONE, "with --json: each request, too", {"action": "store_true"}),
    CommandFlag(
        ("--plots",), _ONE, "draw figures into a folder (needs twinpool[plots])", {"type": Path, "metavar": "FOLDER"}
    ),
)
