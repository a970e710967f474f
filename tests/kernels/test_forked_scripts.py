"""Scripts that are run one after the other: each says its own, whatever became of the one before."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.forked_scripts import ScriptFailed, run_scripts

SAYS = "import json, os, sys; print(json.dumps({'said': [sys.argv[1:], os.environ['TRITON_INTERPRET'], __name__]}))"


def test_a_script_that_fails_or_is_killed_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    texts = {
        "fails": "print('{}', flush=True); raise ValueError('planted')",
        "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "is_silent": "",
        "says": "print('{\"claim\": null}')",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    said = {
        Path(name).name: what
        for name, what in run_scripts({str(tmp_path / name): [] for name in texts}, tmp_path, interpreted=True)
    }
    assert list(said) == list(texts)
    failed = [str(said[name]) for name in ("fails", "dies", "is_silent") if isinstance(said[name], ScriptFailed)]
    assert [text.partition("ended with ")[2].partition(":")[0] for text in failed] == ["1", "-9", "0"]
    assert "ValueError: planted" in failed[0]
    assert said["says"] == {"claim": None}


def test_a_script_is_given_its_own_claims_and_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(SAYS)
    scripts = {str(tmp_path / "one"): ["claim_a", "claim_b"], str(tmp_path / "two"): []}
    said = [what["said"] for _, what in run_scripts(scripts, tmp_path, interpreted=False)]
    assert said == [[["claim_a", "claim_b"], "0", "__main__"], [[], "0", "__main__"]]
