"""`kc-otel remedy`: lines to paste, the same numbers as JSON, and what it refuses."""

import json
import shlex

import pytest

from kc_otel.offline import remedy as module
from kc_otel.recordings.recording_files import save_recording
from tests.cli.test_compare_command import CONTRACT, make
from tests.offline.remedy.test_remedy import SOME

LONG = ', long: {where: {prompt_tokens: ">= 99999"}}}'


@pytest.fixture
def run(monkeypatch, tmp_path, command):
    """Runs `kc-otel remedy` with a short catalogue."""
    monkeypatch.setattr(module, "catalogue", lambda **_: SOME)
    monkeypatch.chdir(tmp_path)
    save_recording(make(sequences=900), "log.npz")
    kept = CONTRACT.replace(LONG, "}").replace("limit: 0.9}", "limit: 0.95}")
    tmp_path.joinpath("kept.yaml").write_text(kept)
    tmp_path.joinpath("broken.yaml").write_text(CONTRACT.replace("limit: 0.9}", "limit: 0.01}"))
    tmp_path.joinpath("empty.yaml").write_text(kept.replace("}}}", "}}" + LONG))
    kl = "statistical:\n  - {id: kl, metric: k3, unit: token, limit: 0.00001}\n"
    tmp_path.joinpath("exceeded.yaml").write_text(kept.replace("statistical:\n", kl))
    return command("remedy")


@pytest.mark.slow
def test_a_line_to_paste_is_one_line_on_any_terminal(run):
    code, out, _ = run("log.npz", "--contract", "kept.yaml", "--trainer", "verl", width=40)
    assert code == 0
    (line,) = [text for text in out.splitlines() if text.startswith("algorithm.")]
    assert all("=" in word for word in shlex.split(line))
    assert "slime" not in out


@pytest.mark.slow
def test_json_says_the_same_for_every_correction_slice_and_trainer(run):
    code, out, _ = run("log.npz", "--contract", "kept.yaml", "--json")
    answer = json.loads(out)
    assert code == 0
    assert [correction["name"] for correction in answer["corrections"]] == [correction.name for correction in SOME]
    chosen = next(correction for correction in answer["corrections"] if correction["name"] == answer["chosen"]["trl"])
    assert chosen["meets"]
    assert chosen["lines"]["trl"] == answer["lines"]["trl"]
    assert set(chosen["costs"]) == {"all", "code", "tables"}
    promised = {(found["promise"]["clause"], found["promise"]["slice"]) for found in chosen["findings"]}
    assert {("token-tv", "tables"), ("reward", "tables")} <= promised
    assert 0.0 <= chosen["costs"]["tables"]["dropped_positive"] <= 1.0


@pytest.mark.slow
def test_where_nothing_keeps_the_contract_it_says_so_and_ends_with_1(run):
    code, out, _ = run("log.npz", "--contract", "broken.yaml")
    assert code == 1
    said = " ".join(out.split())
    assert said.count("No correction keeps the contract. The closest is ") == 3
    assert "reward on tables" in said


def test_a_slice_without_sequences_is_named_and_ends_with_1(run):
    code, out, _ = run("log.npz", "--contract", "empty.yaml", width=300)
    assert code == 1
    assert "No whole sequence of this recording is in long: no correction is decided there." in out
    assert " keeps " not in out.replace("No correction keeps", "")


@pytest.mark.slow
def test_a_limit_that_is_exceeded_with_every_correction_ends_with_1(run):
    """The correction that keeps the others is printed all the same, without a claim about all limits."""
    code, out, _ = run("log.npz", "--contract", "exceeded.yaml", "--trainer", "verl", width=300)
    assert code == 1
    assert "Beyond their limits, and no correction changes that: kl on " in out
    assert " keeps the 6 limits that a correction can change, with the lowest variance." in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("log.npz", "--contract", "kept.yaml", "--trainer", "ppo"), "'ppo' is not known; write one of verl, trl"),
        (("none.npz", "--contract", "kept.yaml"), "none.npz"),
        (("log.npz", "--contract", "log.npz"), "log.npz"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(run, arguments, why):
    code, _, err = run(*arguments)
    assert code == 2
    assert why in err
