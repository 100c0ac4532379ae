"""A run's log of averages: what is read of it, what is said of sick runs, and how rarely that is said of sound ones."""

from __future__ import annotations

import json
import math
import re
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kc_otel
from kc_otel.offline.run_log.read_run_log import ROLES, UNITS, RunLogError, read_run_log
from kc_otel.offline.run_log.run_rules import RULES, diagnose_run, roles_of

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
        "entropy": 0.8 - 0.5 * progress + correlated(rng, 0.03),
        "reward": 0.2 + 0.5 * progress + correlated(rng, 0.03),
        "lag": rng.integers(0, 4, STEPS.size).astype(float),
        "ratio": 1.0 + correlated(rng, 0.01),
    }


def judged(values):
    """What each rule says of a run."""
    log = {ROLES[role][0]: (STEPS, series) for role, series in values.items()}
    return {finding.rule: finding for finding in diagnose_run(log, roles_of(log))}


def said(values):
    """What is found, by rule."""
    return {rule: finding.said for rule, finding in judged(values).items() if finding.found}


@pytest.mark.slow
def test_sound_runs_are_hardly_ever_called_sick():
    """300 steps whose noise has a memory of ten: nothing is found in 100 runs, as the handbook says."""
    for seed in range(100):
        assert {finding.found for finding in judged(sound(seed)).values()} == {False}


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
        ({"drift": np.where(STEPS == 70, np.nan, 1e-3)}, {"not-finite"}),
        ({"drift": np.full(300, 0.07)}, {"level-absurd"}),
        ({"drift": np.zeros(300)}, {"drift-constant"}),
        ({"drift": np.where(np.isin(STEPS, (80, 131)), 60.0, 1e-3)}, {"spikes"}),
        ({"drift": np.where(STEPS <= 4, 0.02, 1e-3)}, {"first-steps-high"}),
        ({"largest": np.linspace(0.05, 0.7, 300)}, {"tail-grows"}),
        ({"ratio": np.linspace(0.994, 0.02, 300)}, {"ratio-falls"}),
        ({"ratio": np.full(300, 1.6)}, {"ratio-above-one"}),
    ],
)
def test_each_sickness_is_found_and_nothing_else(sick, rules):
    noise = 1.0 + 0.05 * np.random.default_rng(9).standard_normal(300)
    assert set(said(sound(3) | {name: values * noise for name, values in sick.items()})) == rules


def test_a_largest_difference_that_rises_with_the_mean_is_not_said_to_be_of_a_few_tokens():
    rising = {"tail": 40.0 * RISING}
    assert "and the mean does not" in (few := said(sound(3) | rising)["tail-grows"])
    assert "a few tokens drift further and further" in few
    assert "a few tokens" not in said(sound(3) | rising | {"drift": RISING})["tail-grows"]


def test_drift_that_does_not_vary_is_no_measurement():
    """Of a copy it is 0; a number that is rounded to nothing, or repeated, denies no trend either."""
    copied = said(sound(3) | {"drift": np.where(STEPS % 20, 0.0, 1e-3)})["drift-constant"]
    assert "drift is exactly 0 at 285 of 300 steps: unless the kernels agree bit for bit, one side is a copy" in copied
    assert "drift is 0.001 at 300 of 300 steps: it is rounded" in said({"drift": np.full(300, 1e-3)})["drift-constant"]
    assert "drift-constant" not in said({"drift": np.where(STEPS % 2, 0.0, 1e-3)})
    for drift, denied in ((np.zeros(300), None), (sound(3)["drift"], False)):
        answers = judged({"drift": drift, "reward": COLLAPSED, "entropy": COLLAPSED})
        trends = ("drift-rises", "drift-before-collapse", "drift-and-entropy")
        assert [answers[rule].found for rule in trends] == [denied] * 3


def test_steps_that_are_there_again_after_a_resume_are_said(tmp_path):
    notes = []
    first = [{"step": step, "reward": 0.1 * step} for step in range(20)]
    again = [{"step": step, "reward": -1.0} for step in range(15, 20)]
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*first, *first[:3], *again]))
    assert read_run_log(tmp_path / "run.jsonl", notes.append)["reward"][1][-1] == -1.0
    said = (
        "earlier numbers of 5 steps from 15 to 19 do not count: they were logged again, as after a resume or a restart"
    )
    assert notes == [f"{tmp_path}/run.jsonl: {said}"]
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in first))
    (tmp_path / "second.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in again))
    read_run_log(tmp_path, notes.append)
    assert "earlier numbers of 5 steps from 15 to 19 do not count" in notes[1]


def test_a_restarted_run_is_not_continued_by_the_later_steps_of_the_one_before(tmp_path):
    """In one log, as `tee -a` makes it, the second run has not come as far as the first."""
    lines = [f"step:{step} - rollout_corr/k3_kl:{drift}" for end, drift in ((120, 8e-3), (45, 2e-3))
             for step in range(1, end + 1)]  # fmt: skip
    (tmp_path / "run.log").write_text("\n".join(lines))
    notes = []
    steps, drift = read_run_log(tmp_path / "run.log", notes.append)["rollout_corr/k3_kl"]
    assert (steps[-1], set(drift)) == (45, {2e-3})
    assert "earlier numbers of 120 steps from 1 to 120 do not count" in notes[0]


def test_an_old_step_that_is_evaluated_again_is_no_restart(tmp_path):
    rows = [{"step": step, "reward": value} for step, value in [*((at, 0.5) for at in range(40)), (10, 0.9), (40, 0.5)]]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    steps, reward = read_run_log(tmp_path / "log.jsonl")["reward"]
    assert steps.tolist() == list(range(41))
    assert reward[10] == 0.9


def test_a_resumed_run_is_not_continued_by_the_event_file_of_the_one_before(tmp_path):
    for number, (drift, steps) in enumerate(((8e-3, range(1, 121)), (2e-3, range(101, 107)))):
        content = b"".join(event(step, b"rollout_corr/k3_kl", drift) for step in steps)
        (tmp_path / f"events.out.tfevents.170000000{number}.host.1.0").write_bytes(content)
    steps, drift = read_run_log(tmp_path)["rollout_corr/k3_kl"]
    assert (steps[-1], set(drift[-6:])) == (106, {float(np.float32(2e-3))})


def test_checkpoints_of_a_run_that_was_taken_back_are_refused(tmp_path):
    """It collapsed until step 300, began anew at 150 and has come to 200; each checkpoint holds the run up to it."""
    for end, drift in ((150, 2e-3), (200, 2e-3), (300, 9e-3)):
        history = [{"step": step, "reward": 0.5, "k3": 2e-3 if step <= 150 else drift} for step in range(1, end + 1)]
        history[-1]["reward"] = 0.6 if end == 150 else 0.5  # the last step of a checkpoint may be evaluated again
        file = tmp_path / f"checkpoint-{end}" / "trainer_state.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"log_history": history}))
    with pytest.raises(RunLogError, match=r"-200/.* and .*-300/.*: say other numbers of the same steps"):
        read_run_log(tmp_path)
    file.unlink()
    assert set(read_run_log(tmp_path)["k3"][1]) == {2e-3}


def test_what_moves_with_the_weights_is_told():
    base, lag = sound(3), (STEPS % 4).astype(float)
    found = said(base | {"drift": base["drift"] * (1.0 + lag), "lag": lag})
    assert "drift-follows-lag" in found


@pytest.mark.slow
def test_a_number_that_wanders_is_said_to_trend_as_often_as_the_handbook_says():
    """27 of 200 random walks, whose logarithm moves by 5 % a step."""
    walks = (1e-3 * np.exp(np.cumsum(np.random.default_rng(s).standard_normal(300) * 0.05)) for s in range(200))
    assert sum("drift-rises" in said({"drift": walk}) for walk in walks) == 27


def test_a_trend_is_steady_and_twofold():
    noise = 1.0 + 0.01 * np.random.default_rng(9).standard_normal(300)
    assert not said(sound(3) | {"drift": 1e-3 * (1.0 + STEPS / 900) * noise})
    unsteady = np.repeat([1.0, 3.0, 0.5, 2.0, 1.5, 4.0, 2.2, 3.5, 2.8, 5.0], 30)
    assert not said(sound(3) | {"drift": 1e-3 * unsteady * noise})


def test_two_numbers_that_both_grow_are_not_one_because_of_the_other():
    noise = 1.0 + 0.05 * np.random.default_rng(9).standard_normal(300)
    grown = said(sound(3) | {"drift": RISING * noise, "lag": np.floor(STEPS / 60)})
    assert "drift-follows-lag" not in grown


def test_an_entropy_that_rises_too_is_an_explanation():
    found = said(sound(3) | {"drift": RISING, "entropy": RISING * 300})
    assert "the policy alone may explain this" in found["drift-and-entropy"]


def test_the_order_of_drift_and_collapse_is_not_invented():
    late = 1e-3 * np.exp(4.0 * np.clip((STEPS - 240) / 20, 0, None))
    assert "drift-before-collapse" not in said(
        sound(3) | {"drift": late * np.linspace(1, 1.01, 300), "reward": COLLAPSED}
    )


@pytest.mark.parametrize("cadence", [1, 5])
def test_steps_that_a_logger_left_out_are_told(cadence):
    at = np.arange(0, 200, cadence)
    here = at[(at < 150) | (at >= 190)]
    log = {"loss": (np.arange(200), np.ones(200)), "mismatch_kl/all/mean": (here, np.full(here.size, 1e-3))}
    (found,) = (finding for finding in diagnose_run(log, roles_of(log)) if finding.rule == "steps-missing")
    assert f"at {40 // cadence} of {200 // cadence} steps at which others have one, first at step 150:" in found.said
    log["mismatch_kl/all/mean"] = (at, np.full(at.size, 1e-3))
    (found,) = (finding for finding in diagnose_run(log, roles_of(log)) if finding.rule == "steps-missing")
    assert found.found is False


def test_a_level_is_judged_in_its_numbers_unit():
    """0.1 is absurd as a KL divergence and honest as a mean |log ratio|; of a name of one's own nothing is said."""

    def level(name, value, given=None):
        log = {name: (np.arange(20), np.full(20, value))}
        return next(e.found for e in diagnose_run(log, roles_of(log, given)) if e.rule == "level-absurd")

    assert level("rollout_corr/k3_kl", 0.1)
    assert not level("train/train_rollout_logprob_abs_diff", 0.1)
    assert not level("train/token_mult_prob_error", 1.1)
    assert level("train/token_mult_prob_error", 1.4)
    assert level("mine", 0.9, {"drift": "mine"}) is None
    assert UNITS.keys() == {*ROLES["drift"]}


def test_what_is_missing_is_said():
    """A log without rewards, or too short, cannot tell, and says what it would take."""
    log = {"rollout_corr/k3_kl": (STEPS[:20], RISING[:20])}
    found = {finding.rule: finding for finding in diagnose_run(log, roles_of(log))}
    assert found.keys() == RULES.keys()
    assert found["ess-falls"].found is None
    named = (
        "not in the log: ess (such as rollout_corr/rollout_is_eff_sample_size); if it has another name there: --name "
    )
    assert found["ess-falls"].said == f"{named}ess=NAME"
    assert found["drift-rises"].said == "only 20 steps have all numbers; it takes 30"


def test_names_may_have_a_prefix_or_be_ones_own():
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
    "slime.jsonl": b"".join(
        b'{"_step": %d, "rollout/step": 9, "rollout/x": 1}\n{"_step": %d, "reward": %f, "train/step": %d}\n'
        % (7 * s, 7 * s + 1, s / 4, s)
        for s in (1, 2, 3)
    ),
    "console.log": b"".join(
        b"\x1b[36m(TaskRunner pid=1)\x1b[0m step:%d - reward:%f - a/b:np.float64(2.5)\n" % (s, s / 4) for s in (1, 2, 3)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    for path in (tmp_path / name, tmp_path):
        steps, values = read_run_log(path)["reward"]
        assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [0.25, 0.5, 0.75])


@pytest.mark.parametrize("name", FILES)
def test_hostile_bytes_are_refused_or_left_out(tmp_path, name):
    rng, data = np.random.default_rng(0), FILES[name]
    for _ in range(60):
        spoilt = bytearray(data)
        for at in rng.integers(0, len(data), 8):
            spoilt[at] = rng.integers(256)
        (tmp_path / name).write_bytes(bytes(spoilt[: rng.integers(1, len(data) + 1)]))
        with suppress(RunLogError):
            read_run_log(tmp_path / name)


def test_a_folder_without_logs_says_what_would_be_one(tmp_path):
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


@pytest.mark.parametrize("onset", [150, *(pytest.param(onset, marks=pytest.mark.slow) for onset in (30, 255))])
@pytest.mark.parametrize("factor", [3, 10, 100])
def test_drift_that_rises_at_once_is_found_and_dated(onset, factor):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        steps = np.arange(300)
        drift = 0.002 * np.exp(0.15 * rng.standard_normal(300)) * np.where(steps >= onset, factor, 1)
        reward = np.where(steps > onset + 15, 0.05, 0.2 + 0.5 * np.minimum(steps / onset, 1))
        log = {"d": (steps, drift), "r": (steps, reward + 0.02 * rng.standard_normal(300))}
        found = {finding.rule: finding for finding in diagnose_run(log, {"drift": "d", "reward": "r"})}
        assert found["drift-rises"].found
        assert found["drift-before-collapse"].found
        said = int(re.search(r"initial value from step (\d+)", found["drift-rises"].said)[1])
        assert abs(said - onset) <= 4


@pytest.mark.parametrize("late", [8, 14, 20])
def test_drift_that_rose_until_the_end_of_the_run_is_not_denied(late):
    """People stop a run soon after the collapse: too few steps for a trend, and none is called absent."""
    rng = np.random.default_rng(0)
    drift = 0.002 * np.exp(0.1 * rng.standard_normal(300)) * np.where(late > 300 - STEPS, 30, 1)
    found = judged(sound(0) | {"drift": drift})
    rises, *others = (found[rule] for rule in ("drift-rises", "drift-before-collapse", "drift-and-entropy"))
    level = re.search(r"from 0.00\d+ to (0.0\d+)", rises.said)
    assert 0.055 < float(level[1]) < 0.065  # that of the steps since the rise
    if late == 20:
        assert rises.found
    else:
        assert (rises.found, {finding.said for finding in others}) == (None, {rises.said})
        assert int(re.search(r"on: (\d+) entries of the log, too few", rises.said)[1]) in range(late - 3, late + 1)


def test_what_fell_until_the_end_of_the_run_is_not_denied():
    ess = (0.95 + 0.01 * np.random.default_rng(0).standard_normal(300)) * np.where(STEPS > 288, 0.1, 1.0)
    found = judged({"ess": ess})["ess-falls"]
    assert found.found is None
    assert re.match(
        r"it fell from 0.95\d* to 0.09\d* from step 2\d\d on: 1[0-2] entries of the log, too few", found.said
    )


def collapsed(drift, every=1):
    """What is found of a run whose reward collapses at step 190, and of its drift."""
    rng, steps = np.random.default_rng(0), np.arange(0, 300, every)
    reward = np.clip(np.where(steps < 190, 0.2 + steps / 240, 0.7 - (steps - 190) / 20), 0.02, 0.7)
    log = {
        "rollout_corr/k3_kl": (steps, drift(steps) * np.exp(0.15 * rng.standard_normal(steps.size))),
        "critic/rewards/mean": (steps, reward + 0.01 * rng.standard_normal(steps.size)),
    }
    return {finding.rule: finding for finding in diagnose_run(log, roles_of(log))}


@pytest.mark.parametrize("end", [210, 230, 260])
@pytest.mark.parametrize("gradual", [True, False])
def test_drift_that_fell_after_the_reward_is_not_denied(gradual, end):
    """A policy that has collapsed has a low entropy, so its kernels drift less."""
    rise = (
        (lambda steps: 20 ** np.clip((steps - 100) / 90, 0, 1)) if gradual else (lambda steps: 1 + 14 * (steps > 149))
    )
    found = collapsed(lambda steps: np.where(steps < end, 0.002 * rise(steps), 0.001))
    assert found["drift-before-collapse"].found
    assert found["drift-rises"].found is None
    assert re.match(
        r"it rose from 0.00\d+ to 0.0\d+ at steps 1\d\d to 2\d\d, and fell again", found["drift-rises"].said
    )


def test_drift_that_rose_for_a_while_is_not_denied():
    """Also where its level is absurd meanwhile, and where an entry of the log is ten steps."""
    found = collapsed(lambda steps: np.where((steps >= 150) & (steps < 220), 0.5, 0.002))
    assert found["level-absurd"].found is None
    assert found["level-absurd"].said.startswith("drift is 0.487 at steps 150 to 219 alone")
    found = collapsed(lambda steps: np.where((steps >= 100) & (steps < 190), 0.03, 0.002), every=10)
    assert found["drift-rises"].found is None
    assert "at steps 100 to 180, and fell again" in found["drift-rises"].said
    assert {rule for rule, finding in collapsed(lambda steps: 0.002 + 0 * steps).items() if finding.found is None} <= {
        rule for rule, finding in found.items() if "not in the log" in finding.said
    }


def test_drift_that_rose_shortly_before_the_reward_fell_is_not_denied():
    found = collapsed(lambda steps: np.where((steps >= 190) & (steps < 205), 0.03, 0.002))["drift-before-collapse"]
    assert found.found is None
    assert re.match(r"before the reward was halfway down at step \d+, it rose from", found.said)


@pytest.mark.slow
def test_level_drift_rises_neither_step_by_step_nor_at_once():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([30, 60, 300]))
        drift = 0.002 * np.exp(rng.choice([0.3, 1.0]) * rng.standard_normal(size))
        found = {row.rule: row.found for row in diagnose_run({"d": (np.arange(size), drift)}, {"drift": "d"})}
        assert (found["drift-rises"], found["first-steps-high"], found["spikes"]) == (False, False, False)


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
    (tmp_path / "run.csv").write_text(text, encoding="utf-8")
    steps, values = read_run_log(tmp_path / "run.csv")["rewards/mean"]
    assert steps.tolist() == values.tolist() == list(range(40))


@pytest.mark.parametrize("own", [{"input": "1+1", "output": "2"}, {"token_ids": [3, 8], "group": 1}])
def test_rollouts_beside_a_log_are_no_part_of_it(tmp_path, own):
    rows = [{"step": step, "reward": 0.5, **more} for step in range(20) for more in ({}, own | {"reward": 1.0})]
    logged, sampled = ([row for row in rows if ("group" in row or "input" in row) is part] for part in (False, True))
    for name, lines in (("log", logged), ("rollouts", sampled)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    told = []
    assert read_run_log(tmp_path, told.append)["reward"][1].tolist() == [0.5] * 20
    assert not told


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
    for part in range(6):  # none of which has enough steps to tell by itself
        lines = (f"{step},{step}\n" for step in range(8 * part, 8 * part + 8))
        (first.parent / f"{part}.csv").write_text("step,rewards/mean\n" + "".join(lines))
    first.unlink()
    with pytest.raises(RunLogError, match=r"b/run.csv: say other numbers of the same steps"):
        read_run_log(tmp_path / "runs")


def test_numbers_that_count_different_steps_are_not_ordered():
    """Drift of slime is by optimizer step, with four to a rollout, and the reward by rollout."""
    series = {"drift": np.repeat(np.where(STEPS < 150, 1e-3, 5e-3), 4), "reward": np.where(STEPS < 225, STEPS, 0.0)}
    log = {ROLES[role][0]: (np.arange(1, values.size + 1), values) for role, values in series.items()}
    found = {finding.rule: finding for finding in diagnose_run(log, roles_of(log))}
    assert found["drift-rises"].found
    assert found["drift-before-collapse"].found is None
    assert found["drift-before-collapse"].said == (
        "rollout_corr/k3_kl goes to step 1200 and critic/score/mean goes to step 300: they count different steps, or "
        "one stops early"
    )


def test_training_is_read_where_evaluation_has_the_same_names():
    log = {f"{part}/reward": (STEPS, STEPS * 1.0) for part in ("eval", "train")}
    assert roles_of(log, None)["reward"] == "train/reward"
    assert roles_of({"eval/reward": log["eval/reward"]}, None)["reward"] == "eval/reward"


def test_drift_that_is_no_number_when_the_reward_falls_is_found():
    drift = np.where(STEPS >= 200, np.nan, 1e-3 * (1.0 + 0.05 * np.random.default_rng(0).standard_normal(300)))
    reward = np.where(STEPS > 215, 0.0, 0.2 + 0.5 * np.minimum(STEPS / 200, 1)) + 0.0
    log = {"d": (STEPS, drift), "r": (STEPS, reward + 0.01 * np.random.default_rng(1).standard_normal(300))}
    found = {finding.rule: finding for finding in diagnose_run(log, {"drift": "d", "reward": "r"})}
    assert found["not-finite"].found
    assert found["drift-before-collapse"].found, found["drift-before-collapse"].said
    assert re.search("to NaN or infinite values, .* initial value from step 20[0-4]$", found["drift-rises"].said)


@pytest.mark.parametrize(("numbers", "answer"), [(0, None), (29, None), (100, True), (300, False)])
def test_drift_without_numbers_is_not_judged(numbers, answer, recwarn):
    """Of fewer finite numbers than a trend takes nothing is said, and the rules of its size give one answer."""
    drift = np.where(np.arange(300) >= numbers, np.nan, sound(0)["drift"])
    log = {"d": (STEPS, drift), "e": (STEPS, sound(0)["entropy"]), "r": (STEPS, sound(0)["reward"])}
    found = {finding.rule: finding for finding in diagnose_run(log, {"drift": "d", "entropy": "e", "reward": "r"})}
    assert [found[rule].found for rule in ("drift-rises", "drift-and-entropy")] == [answer, answer]
    assert found["drift-before-collapse"].found is (None if answer is None else False)
    assert found["not-finite"].found is (numbers < 300)
    assert not [warned.message for warned in recwarn]


# Rows as each trainer's logger writes them of a step, with its drift.
LOGGED = {
    "verl": lambda step, drift: [{"step": step, "data": {
        "rollout_corr/k3_kl": drift, "rollout_corr/kl": drift, "rollout_corr/rollout_is_mean": 1,
        "training/rollout_probs_diff_max": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.9,
        "actor/entropy": 1, "critic/score/mean": 1, "training/global_step": step,
        "training/off_policy/trajectory_staleness/mean": 0}}],
    "TRL and Unsloth": lambda step, drift: [{
        "step": step, "loss": 0.0, "reward": 0.5, "entropy": 0.4, "epoch": step / 200,
        "sampling/sampling_logp_difference/mean": drift, "sampling/sampling_logp_difference/max": 0.5,
        "sampling/importance_sampling_ratio/mean": 1.0}],
    "prime-rl": lambda step, drift: [
        {"step": step, "time": 1.5e9, "train/all/math/reward/mean": 1, "off_policy/mean": 1},
        {"step": step, "time": 1.6e9, "mismatch_kl/all/mean": drift, "mismatch_kl/all/max": 1,
         "entropy/all/mean": 1}],
    "NeMo-RL": lambda step, drift: [{
        "_step": step, "train/gen_kl_error": drift, "train/token_mult_prob_error": 1.01, "train/reward": 1,
        "train/sampling_importance_ratio": 1, "train/approx_entropy": 1}],
    "slime": lambda step, drift: [
        {"_step": 2 * step, "rollout/step": step // 2, "rollout/raw_reward": 1},
        {"_step": 2 * step + 1, "train/step": step, "train/train_rollout_logprob_abs_diff": drift, "train/tis": 1,
         "train/entropy_loss": 1}],
    "SkyRL": lambda step, drift: [{
        "_step": 5, "trainer/global_step": step, "policy/rollout_train_logprobs_abs_diff_mean": drift,
        "policy/rollout_train_logprobs_abs_diff_max": 1, "policy/loss_metrics/is_ratio_mean": 1,
        "policy/policy_entropy": 1, "reward/avg_raw_reward": 1}],
    "AReaL": lambda step, drift: [{
        "_step": step, "ppo_actor/update/behave_approx_kl/avg": -drift, "ppo_actor/update/behave_imp_weight/avg": 1,
        "ppo_actor/update/entropy/avg": 1, "ppo_actor/task_reward/avg": 1,
        "ppo_actor/update/version_stats/sample_staleness_proximal_avg": 1}],
    "OpenRLHF": lambda step, drift: [{
        "_step": 5, "train/global_step": step, "train/vllm_kl": drift, "train/ppo_kl": 0,
        "train/entropy_loss": 1, "train/reward": 1}],
    "ROLL": lambda step, drift: [{
        "_step": step, "actor/train_infer_diff_token_mean": -drift, "actor/train_infer_ratio_token_mean": 1,
        "critic/entropy/mean": 1, "critic/score/mean": 1}],
    "Open-Instruct": lambda step, drift: [{
        "_step": 5, "training_step": step, "global_step": 90, "episode": 90, "scores": 1, "val/rho_weight": 1,
        "debug/vllm_vs_local_logprob_diff_mean": drift, "debug/vllm_vs_local_logprob_diff_max": 1,
        "policy/entropy_avg": 1}],
}  # fmt: skip


@pytest.mark.parametrize("trainer", LOGGED)
def test_every_trainers_names_and_steps_are_known(tmp_path, trainer):
    rows = [row for step in range(1, 201) for row in LOGGED[trainer](step, 9e-3 if step > 100 else 1e-3)]
    state = trainer.startswith("TRL")
    file = tmp_path / ("trainer_state.json" if state else "run.jsonl")
    file.write_text(json.dumps({"log_history": rows}) if state else "".join(json.dumps(row) + "\n" for row in rows))
    log = read_run_log(file)
    roles = roles_of(log)
    assert roles.keys() >= {"drift", "entropy", "reward"}
    assert log[roles["drift"]][0].tolist() == list(range(1, 201))
    rises = next(finding for finding in diagnose_run(log, roles) if finding.rule == "drift-rises")
    assert int(re.search(r"from step (\d+)$", rises.said)[1]) in range(101, 105)


def test_the_handbook_has_each_trainers_source_and_each_rule():
    page = (Path(kc_otel.__file__).parent / "handbook/pages/reference/run-log.md").read_text()
    assert {*re.findall(r"^\| ([^|]+) \| \S+/\S+ at [0-9a-f]{12}", page, re.MULTILINE)} == {
        name.replace(" and ", ", ") for name in LOGGED
    }
    assert {*re.findall(r"^\| ([a-z-]+) \|", page.partition("## Rules")[2], re.MULTILINE)} == {
        "rule", "---", *RULES
    }  # fmt: skip
