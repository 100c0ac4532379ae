"""A contract's verdicts as scalars for a trainer's log: what they are, in this process and from an evaluator."""

import logging
import math
import os
import sys

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel import Recorder, TrainingLog
from kc_otel.client.training_log import _Asking, scalars
from kc_otel.contract.load import load_text
from kc_otel.judge import evaluator
from kc_otel.judge.verdict import Cell, Status, Verdict
from tests.integration.conftest import CONTRACT, Evaluator
from tests.record.recorder.conftest import Memory
from tests.tools.servers import answering
from tests.tools.waiting import eventually

SOON = 120.0


@pytest.fixture
def policy(monkeypatch):
    """A contract with a limit of 0.02 on the mean of tv_token; nothing is exported over the network."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    return load_text(CONTRACT)


def batch(recorder, sigma, seed, task="code"):
    """200 sequences of 64 tokens, log ratios of a standard deviation; their mean of tv_token."""
    rng = np.random.default_rng(seed)
    inference = -rng.exponential(size=(200, 64)) - 2.0
    train = inference + sigma * rng.normal(size=inference.shape).clip(-4, 4) - sigma**2 / 2  # E_Q[P/Q] = 1
    recorder.compare(train, inference, attributes={"task": task}, presampled=True)
    return float(np.maximum(-np.expm1(train - inference), 0.0).mean())


def test_a_run_that_breaks_the_contract_says_so_in_its_own_log(policy):
    with Recorder(policy, log=TrainingLog()) as recorder:
        drift, rounding = batch(recorder, 0.2, 1), batch(recorder, 0.01, 2, "prose")
        assert recorder.force_flush(SOON)
        found = recorder.scalars()
    assert found.pop("kc/token-tv/worst/code") == pytest.approx(drift, rel=1e-3)
    assert found.pop("kc/token-tv/all") == pytest.approx((drift + rounding) / 2, rel=1e-3)
    assert found.pop("kc/token-tv/limit") == 0.02
    assert 0.02 < found.pop("kc/token-tv/bound") < drift
    assert found == {"kc/token-tv/evidence": 1.0, "kc/token-tv/verdict": 3.0, "kc/failing": 2.0}


def test_a_run_that_keeps_it_passes_once_every_slice_is_measured(policy):
    with Recorder(policy, log=TrainingLog()) as recorder:
        batch(recorder, 0.01, 1)
        assert recorder.force_flush(SOON)
        found = recorder.scalars()
        assert (found["kc/token-tv/verdict"], found["kc/failing"]) == (2.0, 0.0)
        batch(recorder, 0.01, 2, "prose")
        assert recorder.force_flush(SOON)
        found = recorder.scalars()
    assert found["kc/token-tv/verdict"] == found["kc/failing"] == 0.0
    assert found["kc/token-tv/all"] < found["kc/token-tv/bound"] < 0.02


def test_a_run_that_cannot_be_judged_any_more_has_no_verdict(policy, monkeypatch):
    """The last PASS is of another export: it is not logged for what nobody has judged."""
    with Recorder(policy, log=TrainingLog()) as recorder:
        batch(recorder, 0.01, 1)
        assert recorder.force_flush(SOON)
        assert recorder.scalars()["kc/failing"] == 0.0
        monkeypatch.setattr(evaluator.Evaluator, "evaluate", lambda *_: 1 / 0)
        batch(recorder, 0.2, 2)
        assert recorder.force_flush(SOON)
        assert recorder.scalars() == {}


def test_a_clause_that_needs_what_is_not_installed_is_not_judged_and_costs_a_line(policy, monkeypatch, caplog):
    tail = '\n  - {id: tail, metric: tv_token, statistic: "fraction > 0.1", unit: token, limit: 5%}'
    policy = load_text(CONTRACT.replace("statistical:", f"statistical:{tail}"))
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with caplog.at_level(logging.ERROR), Recorder(policy, log=TrainingLog()) as recorder:
        for task in ("code", "prose"):
            batch(recorder, 0.2, 1, task)
            assert recorder.force_flush(SOON)
        assert (recorder.scalars()["kc/tail/verdict"], recorder.scalars()["kc/token-tv/verdict"]) == (2.0, 3.0)
    (line,) = caplog.records
    assert "pip install 'kc-otel[stats]'" in line.message
    assert line.exc_info is None


def test_asking_brings_the_next_answer_up_to_date(policy):
    with Recorder(policy, log=TrainingLog(), export_interval=1000.0) as recorder:
        assert recorder.scalars() == {}
        batch(recorder, 0.01, 1)
        eventually(lambda: recorder.scalars().get("kc/failing") == 0.0)


def test_what_is_exported_elsewhere_is_the_same(policy):
    memory = Memory()
    with Recorder(policy, metric_exporter=memory, log=TrainingLog()) as recorder:
        batch(recorder, 0.01, 1)
        assert recorder.force_flush(SOON)
        assert memory.count("code") == 200 * 64
        memory.result = MetricExportResult.FAILURE
        batch(recorder, 0.2, 2)
        assert not recorder.force_flush(SOON)
        assert recorder.scalars()["kc/token-tv/worst/code"] > 0.02


def test_a_recorder_without_a_log_has_no_scalars(policy):
    recorder = Recorder(policy)
    assert recorder.scalars() == {}
    recorder.shutdown()
    assert recorder.scalars() == {}


def test_a_log_that_raises_costs_a_line(policy, caplog):

    class Broken:
        def attach(self, _):
            return ()

        def scalars(self):
            raise RuntimeError("no")

    with caplog.at_level(logging.WARNING), Recorder(policy, metric_exporter=Memory(), log=Broken()) as recorder:
        assert recorder.scalars() == recorder.scalars() == {}
        assert recorder.stats().dropped == {"log-failed": 2}


@pytest.mark.slow
def test_with_an_evaluator_it_is_what_that_says(policy, tmp_path, monkeypatch):
    path = tmp_path / "policy.yaml"
    path.write_text(CONTRACT)
    evaluator = Evaluator(path, tmp_path / "state.sqlite", {}, "--no-webhooks")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", evaluator.grpc)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    log = TrainingLog(evaluator.api, refresh=0.1)
    try:
        with Recorder(policy) as other, Recorder(policy, log=log) as recorder:
            mine, theirs = batch(recorder, 0.2, 1), batch(other, 0.3, 2)
            assert recorder.force_flush(SOON)
            assert other.force_flush(SOON)
            both = pytest.approx((mine + theirs) / 2, rel=1e-3)
            eventually(lambda: recorder.scalars().get("kc/token-tv/worst/code") == both)
            assert recorder.scalars()["kc/token-tv/verdict"] == 3.0
            evaluator.kill()
            eventually(lambda: recorder.scalars() == {})
            for sender in (recorder, other):
                sender.shutdown(0.1)
    finally:
        if evaluator.process.poll() is None:
            evaluator.kill()


@pytest.mark.slow
def test_verdicts_of_an_evaluator_that_is_late_are_not_logged():
    ages = ["31", "1"]
    with answering(lambda *_: (200, {"age": ages[0]}, b'{"verdicts": [{"gone": true}]}')) as url:
        asking = _Asking(url, TrainingLog(), 60.0, None)
        asking.shutdown()
        with pytest.raises(ValueError, match="nothing has been evaluated for 31 s"):
            asking._asked()
        del ages[0]
        assert asking._asked() == ([], {})


@pytest.mark.slow
def test_a_token_does_not_follow_a_redirect(policy, monkeypatch, caplog):
    monkeypatch.setenv("KC_OTEL_TOKEN", "kco_secret")
    shown = []

    def redirect(path, headers, _body):
        shown.append((path.partition("?")[0], headers["authorization"]))
        port = headers["host"].rpartition(":")[2]
        return 302 if len(shown) == 1 else 200, {"location": f"http://localhost:{port}/elsewhere"}, b""

    with answering(redirect) as url:
        log = TrainingLog(url, refresh=60.0)
        with Recorder(policy, log=log):
            eventually(lambda: "302" in caplog.text or len(shown) > 1)
    assert shown == [("/api/v1/verdicts", "Bearer kco_secret")]


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'localhost:4320' is not the URL of an evaluator; write one such as http"):
        TrainingLog("localhost:4320")


def verdict(clause, slice, status, upper, **changes):
    about = {"at": 0.0, "limit": 1.0, "estimate": 0.5, "lower": 0.1, "upper": upper, "samples": 10, "window": "short"}
    said = {"method": "", "reason": "", "contract_version": 1, "contract_hash": "", "about": "traffic"}
    return Verdict(Cell("policy", clause, slice), status, **{**about, **said, **changes})


def test_the_worst_slice_is_the_one_with_the_worst_verdict_then_the_least_room():
    found = scalars(
        [
            verdict("a", "all", Status.PASS, 0.2, estimate=0.15),
            verdict("a", "code", Status.PASS, 0.9),
            verdict("a", "prose", Status.FAIL, 3.0, lower=1.2, estimate=2.0),
            verdict("b", "code", Status.PASS, 0.9),
            verdict("b", "prose", Status.PASS, 0.8),
            verdict("b", "all", Status.PASS, 0.95, estimate=0.6),
            verdict("c", "code", Status.INCONCLUSIVE, math.inf, lower=-math.inf, estimate=math.nan),
            verdict("d", "code", Status.NO_DATA, math.nan, estimate=math.nan),
        ]
    )
    assert found == {
        **of("a", worst=("prose", 2.0), bound=1.2, limit=1.0, verdict=3.0, all=0.15),
        **of("b", worst=("code", 0.5), bound=0.9, limit=1.0, verdict=0.0, all=0.6),
        **of("c", limit=1.0, verdict=1.0),
        **of("d", verdict=2.0),
        "kc/failing": 1.0,
    }


def of(clause, worst=None, **named):
    found = {f"kc/{clause}/{name}": value for name, value in named.items()}
    return found if worst is None else {**found, f"kc/{clause}/worst/{worst[0]}": worst[1]}


@pytest.mark.parametrize(("status", "code"), [(Status.NO_DATA, 2.0), (Status.INVALID_INPUT, 4.0)])
def test_a_cell_without_numbers_counts_in_the_verdict_of_its_clause(status, code):
    unknown = verdict("a", "prose", status, math.nan, estimate=math.nan, lower=math.nan)
    found = scalars([unknown, verdict("a", "code", Status.PASS, 0.9)])
    assert found == {**of("a", worst=("code", 0.5), bound=0.9, limit=1.0, verdict=code), "kc/failing": 0.0}
    failing = scalars([unknown, verdict("a", "code", Status.FAIL, 3.0)])
    assert (failing["kc/a/verdict"], failing["kc/failing"]) == (max(code, 3.0), 1.0)
    assert scalars([unknown]) == {"kc/a/verdict": code}


def test_a_run_whose_input_is_invalid_says_so(policy):
    with Recorder(policy, log=TrainingLog()) as recorder:
        unusable = np.full((200, 64), np.nan)
        recorder.compare(unusable, unusable, attributes={"task": "code"}, presampled=True)
        assert recorder.force_flush(SOON)
        assert recorder.scalars() == {"kc/token-tv/verdict": 4.0}
