"""A line to paste does in its trainer what was measured: verl's own numbers, slime's own words; TRL's is in engines."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from kc_otel.offline.remedy.corrections import Correction, Ratios, Weight, weights
from kc_otel.offline.remedy.trainers import TRAINERS, catalogue, line
from kc_otel.recordings.recording import Recording

VERL = json.loads((Path(__file__).parents[2] / "data" / "verl-rollout-correction.json").read_text())


@pytest.fixture(scope="module")
def recording():
    """The tokens that verl's numbers are about."""
    log_w = np.array(VERL["log_ratios"])
    rng = np.random.default_rng(0)
    advantages = np.repeat(rng.choice([-1.0, 0.0, 1.0], len(VERL["lengths"])), VERL["lengths"])
    lengths = np.array(VERL["lengths"])
    return Recording(log_w - 5.0, np.full(log_w.size, -5.0), lengths, ({},) * lengths.size, advantages=advantages)


def test_every_line_for_verl_gives_the_weights_that_verl_gives(recording):
    """143 of them, by their sum, their squares and what is dropped; there is no line that was not tried."""
    rows = {row[0]: row[1:] for row in VERL["rows"]}
    mine = {line("verl", entry): entry for entry in catalogue(advantages=True) if line("verl", entry) is not None}
    assert set(mine) == set(rows)
    for text, (total, squares, dropped) in rows.items():
        found = weights(Ratios(recording), mine[text])
        assert found.sum() == pytest.approx(total, rel=1e-6), text
        assert (found**2).sum() == pytest.approx(squares, rel=1e-6), text
        assert (found == 0.0).sum() == dropped, text


def test_a_range_for_verl_stays_a_text_in_the_shell_and_in_hydra():
    """0.5_5 by itself is 0.55 to Hydra, which verl would take for a cap below 1."""
    text = line("verl", Correction(Weight("token", "mask", 0.5, 5.0)))
    assert "algorithm.rollout_correction.rollout_is_threshold='\"0.5_5.0\"'" in text
    assert shlex.split(text)[-1] == 'algorithm.rollout_correction.rollout_is_threshold="0.5_5.0"'


def test_every_line_for_slime_is_its_truncation_or_its_icepop(recording):
    ratios, tried = Ratios(recording), 0
    for correction in catalogue(advantages=True):
        text = line("slime", correction)
        if text is None or correction.weight is None:
            continue
        words = shlex.split(text)
        low, high = (float(words[words.index(name) + 1]) for name in ("--tis-clip-low", "--tis-clip"))
        w = np.exp(ratios.log_w)
        popped = any(word.endswith("icepop_function") for word in words)
        expected = np.where((w >= low) & (w <= high), w, 0.0) if popped else np.clip(w, low, high)
        assert weights(ratios, correction) == pytest.approx(expected, rel=1e-6), text
        tried += 1
    assert tried > 20


def test_a_trainer_is_offered_only_what_it_has():
    by_family = {correction.family: correction for correction in catalogue(advantages=True)}
    has = {name: {f for f, correction in by_family.items() if line(name, correction) is not None} for name in TRAINERS}
    assert "off_policy" in has["trl"] - has["verl"] - has["slime"]
    assert "seq_mean_k1" in has["verl"] - has["trl"] - has["slime"]
    assert {"sequence truncate", "sequence mask"} <= has["verl"] & has["trl"]
    assert has["slime"] == {"none", "token truncate", "token mask"}
    assert line("verl", Correction(Weight("token", "mask", 0.0, 3.0))) is None
