"""Rules for VictoriaMetrics and the evaluator on the same randomised streams, with restarts, gaps and silence.

The exports go into a real VictoriaMetrics over OTLP, with times of the last hour. A real vmalert replays the generated
rules over that hour, stage by stage, as they follow each other in real time. What it recorded is compared, at the
end of every checked minute and for every clause, slice and window, with a float64 computation, with the intervals that
the rules' have to contain, and with the evaluator's verdicts, as in `test_agreement.py`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
import yaml

from kc_otel.contract import Contract
from kc_otel.contract.clause import Clause
from kc_otel.generate.prometheus.victoria import victoria_file, victoria_groups
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from tests.tools.verdicts import verdicts_of

pytestmark = pytest.mark.slow

STAGES = (
    ("window_histogram", "window_samples", "window_total"),
    ("window_estimate", "window_lower", "window_upper"),
    ("limit", "window_status", "status"),
    ("estimate", "lower", "upper", "samples"),
)
"""What is recorded from what was recorded an interval before."""
Recorded = dict[tuple[str, str, str, str], dict[int, float]]
"""Values by time, by metric, clause, slice and window."""


@pytest.fixture(scope="module")
def contract(streams: ModuleType) -> Contract:
    """A clause per kind of statistic, whose limits lie between the slices' drifts."""
    return streams.contract()


@pytest.fixture
def store(program, servers: ModuleType, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of an empty VictoriaMetrics."""
    address = servers.free_address()
    command = [
        program("victoria-metrics"),
        f"-httpListenAddr={address}",
        f"-storageDataPath={tmp_path / 'store'}",
        "-opentelemetry.usePrometheusNaming",
        "-search.latencyOffset=0s",
        "-search.disableCache",
    ]
    with (
        servers.running(command, tmp_path / "store.log", f"http://{address}/health"),
        httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client,
    ):
        yield client


def replay(program, client: httpx.Client, contract: Contract, folder: Path, start: int, end: int) -> None:
    """What vmalert would have recorded, stage by stage; each sees what the ones before found."""
    rules = [rule for group in victoria_groups(contract) for rule in group["rules"] if "record" in rule]
    for place, names in enumerate(STAGES):
        stage = [rule for rule in rules if rule["record"] in {f"kc_rule_{name}" for name in names}]
        path = folder / f"stage-{place}.yaml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "stage", "interval": "15s", "rules": stage}]}))
        moments = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for at in (start, end))
        command = [
            program("vmalert"),
            f"-rule={path}",
            f"-datasource.url={client.base_url}",
            f"-remoteWrite.url={client.base_url}",
            *(f"-replay.{name}={moment}" for name, moment in zip(("timeFrom", "timeTo"), moments, strict=True)),
            "-replay.rulesDelay=1ms",
            "-replay.disableProgressBar",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        client.get("/internal/force_flush").raise_for_status()


def recorded(client: httpx.Client) -> Recorded:
    """Everything that the rules have recorded."""
    answer = client.get("/api/v1/export", params={"match[]": '{__name__=~"kc_rule_.*", vmrange=""}'})
    found: Recorded = {}
    for line in answer.text.splitlines():
        series = json.loads(line)
        labels = series["metric"]
        key = tuple(labels.get(name, "") for name in ("__name__", "kc_clause", "kc_slice", "kc_window"))
        times = (at // 1000 for at in series["timestamps"])
        found[key] = dict(zip(times, map(_number, series["values"]), strict=True))
    return found


def _number(value: float | str) -> float:
    return float({"Infinity": "inf", "-Infinity": "-inf"}.get(value, value) if isinstance(value, str) else value)


def check_window(tools: ModuleType, contract: Contract, clause: Clause, stream, window: str, at: int, found) -> bool:
    """Whether a window holds anything; if so its estimate and bounds are as they have to be."""
    seen = contract.observability
    ratios, content = stream.between(at, seen.window if window == "short" else seen.long_window, apart=True)
    if not ratios.size:
        return False
    inner = tools.interval_to_hold(clause, contract, content[clause.quantity.key].binned())
    exact, near = tools.truth(clause, contract, ratios)
    lower, upper = inner.lower, inner.upper
    if clause.parsed_statistic.kind != "max":
        lower, upper = min(lower, inner.estimate), max(upper, inner.estimate)
    slack = 1e-9 * (1 + abs(exact))
    said = (clause.id, stream.slice, window, at, exact)
    assert found("samples") == ratios.size, said
    assert found("estimate", 1) == pytest.approx(exact, abs=near + 2e-3 * abs(exact)), said
    assert found("lower", 1) <= min(lower, exact) + slack, said
    assert found("upper", 1) >= max(upper, exact) - slack, said
    return True


@pytest.mark.parametrize("seed", [2])
def test_rules_and_evaluator_agree(
    program, streams: ModuleType, contract: Contract, store: httpx.Client, tmp_path: Path, seed: int
) -> None:
    """Estimates are those of float64, intervals are as proven, verdicts never contradict; steady slices are decided."""
    rng = np.random.default_rng(seed)
    played, base = streams.play(rng), int(time.time() - 3600) // 60 * 60
    evaluator = Evaluator([contract])
    times = sorted({*rng.integers(4, streams.STEPS, 9).tolist(), streams.STEPS - 1})
    verdicts: dict[int, tuple[Verdict, ...]] = {}
    for step in range(streams.STEPS):
        now = base + streams.STEP * step
        for request in streams.requests(contract, played, step, base, apart=True):
            assert evaluator.ingest_metrics(request, float(now)).rejected == 0
            sent = {"Content-Type": "application/x-protobuf"}
            store.post(
                "/opentelemetry/v1/metrics", content=request.SerializeToString(), headers=sent
            ).raise_for_status()
        if step in times:
            verdicts[step] = verdicts_of(evaluator, float(now))
    store.get("/internal/force_flush").raise_for_status()
    replay(program, store, contract, tmp_path, base, base + streams.STEP * (streams.STEPS + 4))
    values, windows, decided = recorded(store), 0, 0

    for clause, stream, window, step in itertools.product(contract.clauses, played, ("short", "long"), times):
        now = base + streams.STEP * step

        def found(name: str, later: int = 0, key=(clause.id, stream.slice, window), now: int = now) -> float:
            return values[f"kc_rule_window_{name}", *key][now + later * streams.STEP]

        windows += check_window(streams, contract, clause, stream, window, now - base, found)
    for step, verdict in ((at, verdict) for at in times for verdict in verdicts[at]):
        (stream,) = (stream for stream in played if stream.slice == verdict.cell.slice)
        said = values.get(("kc_rule_status", verdict.cell.clause, verdict.cell.slice, ""), {})
        rules = said.get(base + streams.STEP * (step + 2))
        contrary = streams.forbidden(contract, stream, verdict, streams.STEP * step, apart=True)
        if contrary is not None:
            assert rules != contrary.code, verdict
            decided += 1
        steady = {"all": Status.PASS, "broken": Status.FAIL}.get(verdict.cell.slice)
        if step == times[-1] and steady is not None and verdict.cell.clause in streams.DECIDED:
            assert (verdict.status, rules) == (steady, steady.code), verdict
    assert windows > 300
    assert decided > 60


def test_vmalert_takes_every_rule_file(program, repository: Path) -> None:
    """Expressions and templates of the checked-in rules are valid, and a planted error is noticed."""
    folder = repository / "dashboards" / "prometheus"
    for rules in ("victoriametrics/rules", "rules"):
        command = [program("vmalert"), "-dryRun", f"-rule={folder / rules}/*.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def test_vmalert_notices_a_planted_error(program, contract: Contract, tmp_path: Path) -> None:
    """A name that is nowhere defined as a function."""
    (tmp_path / "rules.yaml").write_text(victoria_file(contract).text.replace("tfirst_over_time", "imagined_over_time"))
    command = [program("vmalert"), "-dryRun", f"-rule={tmp_path}/*.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "imagined_over_time" in done.stderr
