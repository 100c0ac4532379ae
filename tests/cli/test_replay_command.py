"""`kc-otel replay`: exit codes, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kc_otel.judge.otlp.traffic_entries import marked_frame
from tests.offline.replay.conftest import arrivals, contract_text

COMMANDS = ("replay",)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Eight minutes of a recorder that drifts from the sixth minute on."""
    path = tmp_path / "recording"
    path.write_bytes(b"".join(marked_frame(sent.SerializeToString(), at) for at, sent in arrivals(minutes=8)))
    return path


@pytest.fixture
def contract(tmp_path: Path) -> Any:
    def write(file: str, **changes: Any) -> Path:
        path = tmp_path / file
        path.write_text(contract_text(**{"do": "[{route: train-kernel}, {webhook: pager}]"} | changes))
        return path

    return write


def test_one_contract_says_what_it_does(run: Any, recording: Path, contract: Any) -> None:
    code, out, err = run(recording, "--contract", contract("policy.yaml"))
    assert code == 0, err
    for said in (
        "48 requests, points: 96 accepted",
        "policy v1 (",
        "2 alerts, 2 routes and directives, 1 webhook",
        "still at the end  critical fail: token-tv on all (aaaaaaaaaaaa / bbbbbbbbbbbb) -> route:train-kernel",
        "> limit 0.02 with ",
        "still at the end  route:train-kernel on all away from bbbbbbbbbbbb",
        "webhook pager: 1 firing",
    ):
        assert said in out


@pytest.mark.slow
def test_the_same_contract_exits_with_0_and_another_with_1(run: Any, recording: Path, contract: Any) -> None:
    old, new = contract("old.yaml"), contract("new.yaml", after="1m", version=2)
    code, out, _ = run(recording, "--contract", old, "--against", old)
    assert (code, out.splitlines()[-1]) == (0, "no difference")
    code, out, _ = run(recording, "--contract", contract("of-prose.yaml", task="prose"), "--against", old)
    assert code == 3
    assert "no difference in what was recorded\n\nthe recording cannot tell:\n" in out
    code, out, _ = run(recording, "--contract", new, "--against", old)
    assert code == 1
    assert "~ critical fail: token-tv on all (aaaaaaaaaaaa / bbbbbbbbbbbb): fires 40s later (2027-01-15 08:0" in out
    assert "~ route:train-kernel on all away from bbbbbbbbbbbb: begins 40s later" in out
    _, gone, _ = run(recording, "--contract", contract("new.yaml", limit=0.5), "--against", old)
    assert "only with the old contract:\n- 2027-01-15" in gone
    assert "webhook pager: 0 firing instead of 1" in gone
    _, back, _ = run(recording, "--contract", old, "--against", contract("new.yaml", limit=0.5))
    assert "only with the new contract:\n+ 2027-01-15" in back


@pytest.mark.slow
def test_a_program_gets_json(run: Any, recording: Path, contract: Any) -> None:
    old, new = contract("old.yaml"), contract("new.yaml", after="1m", version=2)
    found = json.loads(run(recording, "--contract", new, "--against", old, "--json")[1])
    moved = found["changed"]["moved"][0]
    assert (moved["later"], moved["ends_later"]) == (40.0, 0.0)
    assert moved["new"]["start"] == found["new"]["alerts"][0]["start"] == found["old"]["alerts"][0]["start"] + 40
    assert found["new"]["version"] == 2
    assert found["changed"]["messages"] == []
    alone = json.loads(run(recording, "--contract", new, "--json")[1])
    assert (alone["old"], alone["changed"], alone["new"]) == (None, None, found["new"])


def test_damage_is_named_beside_the_answer(run: Any, recording: Path, contract: Any) -> None:
    """On the other stream, so that JSON stays JSON; a long list is cut short."""
    content = recording.read_bytes()
    recording.write_bytes(b"\0\0\0\x05spoil" * 7 + content[:-3])
    code, out, err = run(recording, "--contract", contract("policy.yaml"), "--json")
    assert (code, json.loads(out)["new"]["requests"]) == (0, 47)
    said = err.splitlines()
    assert said[0].startswith(f"{recording}: message 1: the body is not an ExportMetricsServiceRequest in protobuf")
    assert len(said) == 6
    assert said[-1] == "and 3 more messages that could not be read"


@pytest.mark.slow
def test_bad_input_exits_with_2_and_says_what_to_do(run: Any, recording: Path, contract: Any, tmp_path: Path) -> None:
    good = contract("policy.yaml")
    for arguments, said in (
        ((tmp_path / "nowhere", "--contract", good), "cannot be read (No such file"),
        ((good, "--contract", good), "is no recording; give what"),
        ((recording, "--contract", tmp_path / "nowhere.yaml"), "nowhere.yaml"),
        ((recording, "--contract", contract("moe.yaml", name="moe")), "has nothing of moe; streams carry"),
        ((recording, "--contract", contract("moe.yaml", name="moe"), "--against", good), "are two contracts"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, said in err) == (2, "", True)
