"""What a correction leaves and costs on every sequence of a small policy, and that a line to paste does the same."""

import itertools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.offline.corrections import TRAINERS, Correction, Ratios, Rejection, Weight, catalogue, line, weights
from kc_otel.offline.remedy import effects
from kc_otel.recordings.recording import Recording

V, T = 3, 3


class Policies:
    """Two softmax policies over all sequences of up to T tokens of V, token 0 ending one; P is differentiable."""

    def __init__(self, seed, drift, *, dropped=False):
        rng = np.random.default_rng(seed)
        self.tables = {}
        self.rows = [y for n in range(1, T + 1) for y in itertools.product(range(V), repeat=n) if self.whole(y)]
        for prefix in (p for n in range(T) for p in itertools.product(range(1, V), repeat=n)):
            z = rng.standard_normal(V)
            q = np.exp(z + drift * rng.standard_normal(V))
            if dropped:
                q[rng.integers(V)] = 1e-300
            self.tables[prefix] = np.exp(z) / np.exp(z).sum(), q / q.sum()
        steps = [[tuple(table[y[t]] for table in self.tables[y[:t]]) for t in range(len(y))] for y in self.rows]
        self.p = np.array([math.prod(a for a, _ in pairs) for pairs in steps])
        self.q = np.array([math.prod(b for _, b in pairs) for pairs in steps])
        self.advantage = rng.uniform(-1.0, 1.0, len(self.rows))
        lengths = np.array([len(y) for y in self.rows])
        self.recording = Recording(
            np.log([a for pairs in steps for a, _ in pairs]),
            np.log([b for pairs in steps for _, b in pairs]),
            lengths,
            ({},) * len(self.rows),
            advantages=np.repeat(self.advantage, lengths),
        )

    @staticmethod
    def whole(y):
        return 0 not in y[:-1] and (y[-1] == 0 or len(y) == T)

    def scores(self):
        """Grad log P of each token by the logits of its prefix, one matrix [tokens, parameters] a sequence."""
        places = {prefix: V * at for at, prefix in enumerate(self.tables)}
        for y in self.rows:
            found = np.zeros((len(y), V * len(places)))
            for t, token in enumerate(y):
                at = places[y[:t]]
                found[t, at : at + V] = -self.tables[y[:t]][0]
                found[t, at + token] += 1.0
            yield found


CORRECTIONS = catalogue(advantages=True)


@pytest.mark.parametrize(("seed", "drift", "dropped"), [(0, 0.1, False), (1, 0.6, False), (2, 0.3, True)])
def test_the_distance_is_that_between_what_is_learned_from_and_the_training_kernel(seed, drift, dropped):
    """Its mean over rollouts is half the L1 distance of the weighted rollouts to P, also without common support."""
    of = Policies(seed, drift, dropped=dropped)
    ratios = Ratios(of.recording)
    for correction in CORRECTIONS:
        found = effects(ratios, correction)
        c = weights(ratios, correction)
        steps = np.abs(c * ratios.spread(of.q) - ratios.spread(of.p))
        assert of.q @ found["sequence"] == pytest.approx(0.5 * ratios.means(steps).sum(), abs=2e-7), correction.name
        assert of.q @ found["weight"] == pytest.approx(of.q @ ratios.means(c)), correction.name
        assert of.q @ found["square"] == pytest.approx(of.q @ ratios.means(c**2)), correction.name


@pytest.mark.parametrize("seed", range(6))
def test_no_bias_of_a_gradient_is_beyond_its_bound(seed):
    """Enumerated: ||E_Q[mean c A s] - E_P[mean A s]|| is at most 2 A_max G times the distance, and may be near."""
    of = Policies(seed, 0.5, dropped=seed % 2 == 0)
    ratios = Ratios(of.recording)
    scores = list(of.scores())
    longest = max(np.linalg.norm(score, axis=1).max() for score in scores)
    spend = []
    for correction in CORRECTIONS:
        found = effects(ratios, correction)
        c = np.split(weights(ratios, correction), of.recording.starts[1:])
        under_q = sum(q * a * (w @ s) / w.size for q, a, w, s in zip(of.q, of.advantage, c, scores, strict=True))
        under_p = sum(p * a * s.mean(axis=0) for p, a, s in zip(of.p, of.advantage, scores, strict=True))
        bound = 2.0 * np.abs(of.advantage).max() * longest * (of.q @ found["sequence"])
        bias = np.linalg.norm(under_q - under_p)
        assert bias <= bound * (1 + 1e-9) + 1e-6, correction.name
        spend.append(bias / max(bound, 1e-6))
    assert max(spend) > 0.02


def test_a_missing_push_is_what_the_weights_leave_by_sign_of_the_advantage():
    of = Recording(
        np.log([0.5, 0.2, 0.3]), np.log([0.25, 0.4, 0.3]), np.array([2, 1]), ({}, {}), advantages=np.array([1.0, 1, -2])
    )
    found = effects(Ratios(of), Correction(Weight("token", "truncate", 0.0, 1.5)))
    assert found["positive"][0] == pytest.approx((2.0 - 1.5 + 0.0) / 2)
    assert found["negative"][1] == pytest.approx(0.0)
    assert np.isnan(found["positive"][1])
    assert np.isnan(found["negative"][0])


log_ratios = st.lists(
    st.lists(st.floats(-70.0, 20.0) | st.floats(-0.1, 0.1), min_size=1, max_size=6), min_size=1, max_size=6
)


def recorded(rows):
    flat = np.concatenate([np.asarray(row) for row in rows])
    lengths = np.array([len(row) for row in rows])
    return Recording(
        np.minimum(flat, 0.0),
        np.minimum(flat, 0.0) - flat,
        lengths,
        ({},) * len(rows),
        advantages=np.where(np.arange(flat.size) % 2, 1.0, -1.0),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(log_ratios)
def test_integrands_stay_in_the_range_that_their_intervals_take_for_granted(rows):
    """1/2 - c/2 to 1/2 + c/2, and to 1/2 where no weight is above its ratio; whatever the log ratios."""
    ratios = Ratios(recorded(rows))
    for correction in CORRECTIONS:
        found = effects(ratios, correction)
        most = correction.largest
        for level, values in (("token", found["token"]), ("sequence", found["sequence"])):
            high = 0.5 if correction.never_above(level) else 0.5 + 0.5 * most
            assert (values <= high + 1e-9).all(), correction.name
            assert (values >= min(0.0, 0.5 - 0.5 * most) - 1e-9).all(), correction.name
        assert (found["square"] <= most * most + 1e-9).all()


def test_masking_sequences_by_their_advantage_takes_advantages():
    of = recorded([[0.1, 0.2]])
    bare = Recording(of.train, of.inference, of.lengths, of.attributes)
    with pytest.raises(ValueError, match="has no advantages; off_policy looks at their sign"):
        weights(Ratios(bare), Correction(None, Rejection("off_policy", -math.inf, 0.1)))
    assert not [correction for correction in catalogue(advantages=False) if "off_policy" in correction.name]


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
    def kind(of):
        return (
            f"{of.weight.level} {of.weight.edge}" if of.weight else of.rejection.statistic if of.rejection else "none"
        )

    kinds = [(kind(of), of) for of in catalogue(advantages=True) if not (of.weight and of.rejection)]
    has = {name: {kind for kind, of in kinds if line(name, of) is not None} for name in TRAINERS}
    assert "off_policy" in has["trl"] - has["verl"] - has["slime"]
    assert "seq_mean_k1" in has["verl"] - has["trl"] - has["slime"]
    assert {"sequence truncate", "sequence mask"} <= has["verl"] & has["trl"]
    assert has["slime"] == {"none", "token truncate", "token mask"}
    assert line("verl", Correction(Weight("token", "mask", 0.0, 3.0))) is None
