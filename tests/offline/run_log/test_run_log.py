"""A run's log of averages: what is read of it, what is said of sick runs, and how rarely that is said of sound ones."""

from __future__ import annotations

import json
import math
import re
import struct
from contextlib import suppress

import numpy as np
import pytest

from kc_otel.offline.run_log.read_run_log import RunLogError, read_run_log
from kc_otel.offline.run_log.run_rules import ROLES, RULES, diagnose_run, roles_of

STEPS = np.arange(1, 301)


def correlated(rng, sigma, memory=0.9):
    """Stationary noise [300] that remembers: x[t] = memory x[t-1] + noise."""
    noise = rng.standard_normal(STEPS.size) * sigma * math.sqrt(1 - memory**2)
    found = np.empty_like(noise)
    found[0] = rng.standard_normal() * sigma
    for at in range(1, noise.size):
        found[at] = memory * found[at - 1] + noise[at]
    return found


def sound(seed):
    """A run that learns: reward up, entropy down, and drift where it was, all with noise that remembers."""
    rng = np.random.default_rng(seed)
    progress = STEPS / STEPS.size
    return {
        "drift": 1e-3 * np.exp(correlated(rng, 0.3)),
        "k1": 1e-3 * np.exp(correlated(rng, 0.3)) + 2e-4 * rng.standard_normal(STEPS.size),
        "largest": np.clip(0.3 + correlated(rng, 0.1), 0, 1),
        "ess": 0.95 + correlated(rng, 0.02),
        "clipped": np.abs(0.02 + correlated(rng, 0.01)),
        "entropy": 0.8 - 0.5 * progress + correlated(rng, 0.03),
        "reward": 0.2 + 0.5 * progress + correlated(rng, 0.03),
        "lag": rng.integers(0, 4, STEPS.size).astype(float),
    }


def said(values):
    """What is found, by rule."""
    log = {ROLES[role][0]: (STEPS, series) for role, series in values.items()}
    return {each.rule: each.said for each in diagnose_run(log, roles_of(log)) if each.found}


@pytest.mark.slow
def test_sound_runs_are_hardly_ever_called_sick():
    """300 steps whose noise has a memory of ten: nothing is found in 100 runs, as the handbook says."""
    assert not [rules for seed in range(100) if (rules := said(sound(seed)))]


RISING = 1e-3 * np.exp(3.0 * np.clip((STEPS - 100) / 100, 0, None))
COLLAPSED = np.where(STEPS < 200, 0.2 + 0.6 * STEPS / 200, np.clip(0.8 - (STEPS - 200) / 60, 0.1, None))


@pytest.mark.parametrize(
    ("sick", "rules"),
    [
        ({"drift": RISING}, {"drift-rises", "drift-and-entropy"}),
        ({"drift": RISING, "reward": COLLAPSED}, {"drift-rises", "drift-and-entropy", "drift-before-collapse"}),
        ({"k1": -1e-3 * np.ones(300)}, {"wrong-distribution"}),
        ({"largest": np.where(STEPS % 3, 1.0, 0.2)}, {"tokens-differ"}),
        ({"ess": np.linspace(0.95, 0.3, 300)}, {"ess-falls"}),
        ({"clipped": np.linspace(0.02, 0.5, 300)}, {"clipping-saturates"}),
        ({"drift": np.where(STEPS == 70, np.nan, 1e-3)}, {"not-finite"}),
    ],
)
def test_each_sickness_is_found_and_nothing_else(sick, rules):
    """Beside values of a sound run, each is named by its own rules."""
    noise = 1.0 + 0.05 * np.random.default_rng(9).standard_normal(300)
    assert set(said(sound(3) | {name: values * noise for name, values in sick.items()})) == rules


def test_what_moves_with_the_weights_is_told():
    """Drift that follows the lag, and drift that repeats as weights are handed over every fourth step."""
    base, lag = sound(3), (STEPS % 4).astype(float)
    found = said(base | {"drift": base["drift"] * (1.0 + lag), "lag": lag})
    assert {"drift-follows-lag", "drift-repeats"} <= found.keys()
    assert "every 4 steps" in found["drift-repeats"]


@pytest.mark.slow
def test_a_number_that_wanders_is_said_to_trend_as_often_as_the_handbook_says():
    """27 of 200 random walks, whose logarithm moves by 5 % a step."""
    walks = (1e-3 * np.exp(np.cumsum(np.random.default_rng(s).standard_normal(300) * 0.05)) for s in range(200))
    assert sum("drift-rises" in said({"drift": walk}) for walk in walks) == 27


def test_a_trend_is_steady_and_twofold():
    """A rise by a third is none, however steady; nor is one that goes up and down, which one in a hundred does."""
    noise = 1.0 + 0.01 * np.random.default_rng(9).standard_normal(300)
    assert not said(sound(3) | {"drift": 1e-3 * (1.0 + STEPS / 900) * noise})
    unsteady = np.repeat([1.0, 3.0, 0.5, 2.0, 1.5, 4.0, 2.2, 3.5, 2.8, 5.0], 30)
    assert not said(sound(3) | {"drift": 1e-3 * unsteady * noise})


def test_two_numbers_that_both_grow_are_not_one_because_of_the_other():
    """Lag that grows over a run in which drift grows too does not explain it."""
    noise = 1.0 + 0.05 * np.random.default_rng(9).standard_normal(300)
    grown = said(sound(3) | {"drift": RISING * noise, "lag": np.floor(STEPS / 60)})
    assert "drift-follows-lag" not in grown


def test_an_entropy_that_rises_too_is_an_explanation():
    """Where entropy rises with drift, the rule says that the policy may be all of it."""
    assert "may be all of it" in said(sound(3) | {"drift": RISING, "entropy": RISING * 300})["drift-and-entropy"]


def test_the_order_of_drift_and_collapse_is_not_invented():
    """Where the reward falls first, drift is no forerunner."""
    late = 1e-3 * np.exp(4.0 * np.clip((STEPS - 240) / 20, 0, None))
    assert "drift-before-collapse" not in said(
        sound(3) | {"drift": late * np.linspace(1, 1.01, 300), "reward": COLLAPSED}
    )


def test_what_is_missing_is_said():
    """A log without rewards, or too short, cannot tell, and says what it would take."""
    log = {"rollout_corr/k3_kl": (STEPS[:20], RISING[:20])}
    found = {each.rule: each for each in diagnose_run(log, roles_of(log))}
    assert found.keys() == RULES.keys()
    assert found["ess-falls"].found is None
    assert "rollout_corr/rollout_is_eff_sample_size" in found["ess-falls"].said
    assert found["drift-rises"].said == "only 20 steps have all numbers; it takes 30"


def test_names_may_have_a_prefix_or_be_ones_own():
    """train/reward is a reward; --name takes any other; a role or a name that is not there is refused."""
    log = {"train/reward": (STEPS, STEPS * 1.0), "mine": (STEPS, RISING)}
    assert roles_of(log, {"drift": "mine"}) == {"drift": "mine", "reward": "train/reward"}
    with pytest.raises(ValueError, match="the log has no such name; it has train/reward, mine"):
        roles_of(log, {"drift": "other"})
    with pytest.raises(ValueError, match="there is no 'drifft'; write one of drift, k1"):
        roles_of(log, {"drifft": "mine"})


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def event(step, name, value):
    data = struct.pack("<Bd", 9, 1.5) + field(2, step) + field(5, field(1, field(1, name) + field(2, value)))
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def wandb(rows):
    """LevelDB's framing; a record longer than what is left of a block goes on in the next."""
    out = b":W&B\xe1\xbe\x00"
    for step, values in rows:
        items = b"".join(field(1, field(2, name) + field(16, json.dumps(value).encode())) for name, value in values)
        data, kind = field(2, items + field(2, field(1, step))), 1
        while True:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += bytes(left)
                continue
            piece, data = data[: left - 7], data[left - 7 :]
            kind = (3 if kind == 3 else 2) if data and kind != 1 else kind
            kind = {(True, 1): 2, (False, 1): 1, (True, 3): 3, (False, 3): 4}.get((bool(data), kind), kind)
            out += struct.pack("<IHB", 0, len(piece), kind) + piece
            if not data:
                break
            kind = 3
    return out


FILES = {
    "events.out.tfevents.1.host.1.0": b"".join(event(s, b"reward", s / 4) for s in (1, 2, 3)) + event(4, b"x", 1.0)[:9],
    "run-ab12.wandb": wandb([(s, [(b"reward", s / 4), (b"big", "x" * 20_000), (b"_step", s)]) for s in (1, 2, 3)]),
    "verl.jsonl": b"".join(b'{"step":%d,"data":{"reward":%f,"text":"x"}}\n' % (s, s / 4) for s in (1, 2, 3)) + b'{"st',
    "history.csv": b"Step,run a - reward,run a - reward__MIN\n1,0.25,9\n2,0.5,9\n3,0.75,\n4,,\n",
    "trainer_state.json": b'{"log_history": [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5, "loss": NaN},'
    b' {"step": 3, "reward": "0.75"}, {"eval": 1}]}',
    "console.log": b"".join(
        b"\x1b[36m(TaskRunner pid=1)\x1b[0m step:%d - reward:%f - a/b:np.float64(2.5)\n" % (s, s / 4) for s in (1, 2, 3)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read(tmp_path, name):
    """Steps and values are the same from each; what a killed run wrote half of is left out; a folder is its files."""
    (tmp_path / name).write_bytes(FILES[name])
    for path in (tmp_path / name, tmp_path):
        steps, values = read_run_log(path)["reward"]
        assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [0.25, 0.5, 0.75])


@pytest.mark.parametrize("name", FILES)
def test_hostile_bytes_are_refused_or_left_out(tmp_path, name):
    """Whatever a file holds, nothing but an error of ours, with its name, comes of it."""
    rng, data = np.random.default_rng(0), FILES[name]
    for _ in range(60):
        spoilt = bytearray(data)
        for at in rng.integers(0, len(data), 8):
            spoilt[at] = rng.integers(256)
        (tmp_path / name).write_bytes(bytes(spoilt[: rng.integers(1, len(data) + 1)]))
        with suppress(RunLogError):
            read_run_log(tmp_path / name)


def test_a_folder_without_logs_says_what_would_be_one(tmp_path):
    """An empty folder, and a file without a number, are refused with what is read."""
    with pytest.raises(RunLogError, match=r"give an events\.out\.tfevents"):
        read_run_log(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"step": 1, "text": "x"}\n')
    with pytest.raises(RunLogError, match="holds no number by step"):
        read_run_log(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"step": 1e30, "reward": 1}\n')
    with pytest.raises(RunLogError, match=r"a\.jsonl: reward has the step 1e\+30"):
        read_run_log(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"step": 1, "reward": 1' + "0" * 400 + "}\n")
    with pytest.raises(RunLogError, match=r"a\.jsonl: int too large"):
        read_run_log(tmp_path / "a.jsonl")


@pytest.mark.parametrize("onset", [30, 150, 255])
@pytest.mark.parametrize("factor", [3, 10, 100])
def test_drift_that_rises_at_once_is_found_and_dated(onset, factor):
    """As where a kernel was rolled out: both halves are level, and the reward falls after it."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        steps = np.arange(300)
        drift = 0.002 * np.exp(0.15 * rng.standard_normal(300)) * np.where(steps >= onset, factor, 1)
        reward = np.where(steps > onset + 15, 0.05, 0.2 + 0.5 * np.minimum(steps / onset, 1))
        log = {"d": (steps, drift), "r": (steps, reward + 0.02 * rng.standard_normal(300))}
        found = {one.rule: one for one in diagnose_run(log, {"drift": "d", "reward": "r"})}
        assert found["drift-rises"].found
        assert found["drift-before-collapse"].found
        said = int(re.search(r"for good from step (\d+)", found["drift-rises"].said)[1])
        assert abs(said - onset) <= 4


@pytest.mark.slow
def test_level_drift_rises_neither_step_by_step_nor_at_once():
    """Whatever its noise, of runs of any length: no level after some step is twice that before it, and stays."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([30, 60, 300]))
        drift = 0.002 * np.exp(rng.choice([0.3, 1.0]) * rng.standard_normal(size))
        (found, *_) = diagnose_run({"d": (np.arange(size), drift)}, {"drift": "d"})
        assert (found.rule, found.found) == ("drift-rises", False)


def rows(*, runs=("",), metric="rewards/mean", steps=40):
    """A history as CSV, of one run or of several."""
    names = [f"{run} - {metric}" if run else metric for run in runs]
    body = "".join(f"{step},{','.join(str(step * (at + 1)) for at in range(len(runs)))}\n" for step in range(steps))
    return f"step,{','.join(names)}\n{body}"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + rows(),
        rows().replace(",", ";"),
        rows().replace(",", "\t"),
        rows().replace("step,", "trainer/global_step,"),
        rows(runs=("policy-7b",)),
    ],
    ids=["bom", "semicolon", "tab", "lightning", "one-run"],
)
def test_a_csv_of_any_program_is_read(tmp_path, text):
    """Whatever stands before, between and above its numbers."""
    (tmp_path / "run.csv").write_text(text, encoding="utf-8")
    steps, values = read_run_log(tmp_path / "run.csv")["rewards/mean"]
    assert steps.tolist() == values.tolist() == list(range(40))


def test_a_log_of_two_runs_is_refused(tmp_path):
    """Or the last one would stand for both, and the one that collapsed would be sound."""
    (tmp_path / "two.csv").write_text(rows(runs=("collapsed", "healthy")))
    with pytest.raises(RunLogError, match="has the columns of 2 runs, collapsed, healthy; export one run alone"):
        read_run_log(tmp_path / "two.csv")
    first, second = tmp_path / "runs" / "a" / "run.csv", tmp_path / "runs" / "b" / "run.csv"
    for file in (first, second):
        file.parent.mkdir(parents=True)
        file.write_text(rows())
    second.write_text(rows().replace("\n39,39", "\n39,7"))
    assert read_run_log(tmp_path / "runs")["rewards/mean"][1][-1] == 7  # gone on with: its last step is said anew
    second.write_text("step,rewards/mean\n" + "".join(f"{step},{3 * step + 1}\n" for step in range(40)))
    with pytest.raises(RunLogError, match=r"a/run.csv and .*b/run.csv: say other numbers of the same steps"):
        read_run_log(tmp_path / "runs")


def test_training_is_read_where_evaluation_has_the_same_names():
    """Its numbers come every step, and its drift is what is asked about."""
    log = {f"{part}/reward": (STEPS, STEPS * 1.0) for part in ("eval", "train")}
    assert roles_of(log, None)["reward"] == "train/reward"
    assert roles_of({"eval/reward": log["eval/reward"]}, None)["reward"] == "eval/reward"


def test_drift_that_is_no_number_when_the_reward_falls_is_found():
    """It is no smaller than any: the steps of the collapse are not left out."""
    drift = np.where(STEPS >= 200, np.nan, 1e-3 * (1.0 + 0.05 * np.random.default_rng(0).standard_normal(300)))
    reward = np.where(STEPS > 215, 0.0, 0.2 + 0.5 * np.minimum(STEPS / 200, 1)) + 0.0
    log = {"d": (STEPS, drift), "r": (STEPS, reward + 0.01 * np.random.default_rng(1).standard_normal(300))}
    found = {one.rule: one for one in diagnose_run(log, {"drift": "d", "reward": "r"})}
    assert found["not-finite"].found
    assert found["drift-before-collapse"].found, found["drift-before-collapse"].said
    assert re.search("to inf, .* for good from step 20[0-4]$", found["drift-rises"].said)
