"""What a recording, or the name of its file, says of itself drives no terminal and begins no line of its own."""

from __future__ import annotations

import json

import pytest

from tests.serve.test_escaped import HOSTILE
from tests.tools.contracts import contract_text

COMMANDS = ("compare", "import", "replay")

CONTRACT = contract_text(statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}])
ROW = {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.0, -2.5], "token_ids": [1, 2]}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
named = pytest.mark.parametrize("text", [text for text in HOSTILE.values() if text.isascii() and "\n" not in text])
"""A refusal may have several lines, and a file that somebody names with a line's end has two in it."""


def harmless(said):
    """Nothing of it drives a terminal, and nothing that was sent begins a line."""
    return all(line.isprintable() for line in said.split("\n")) and "\n12:00:00" not in said


@pytest.mark.slow
@hostile
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "JSON"])
def test_slices_of_a_recording_are_shown_escaped(run, text, form, tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps(ROW | {"task": text}) + "\n")
    code, out, err = run("compare", tmp_path / "log.jsonl", "--by", "task", *form)
    assert code == 0, err
    assert harmless(out + err)
    assert "task=a" in out
    if form == ("--json",):
        assert json.loads(out)["slices"][1]["slice"] == f"task={text}"


@named
def test_names_of_files_are_shown_escaped(run, text, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    good, bad = tmp_path / f"{text}.jsonl", tmp_path / f"bad{text}.jsonl"
    good.write_text(json.dumps(ROW) + "\n")
    bad.write_text("{")
    for words in (
        ("compare", good), ("compare", bad), ("replay", bad, "--contract", tmp_path / "policy.yaml"),
        ("import", good, bad, "--contract", tmp_path / "policy.yaml"),
    ):  # fmt: skip
        said = "".join(run(*words)[1:])
        assert said
        assert harmless(said), words[0]
