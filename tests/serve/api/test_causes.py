"""An incident, the API and the page say which of two causes grew, of planted drift and planted staleness."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

import kc_otel
from kc_otel.contract.load import load_text
from kc_otel.serve import page
from kc_otel.serve.core import Core
from tests.serve.conftest import POLICY
from tests.tools.api import client_of
from tests.tools.memory import Memory
from tests.tools.two_causes import LIMIT, PLANTED, SHARES, sampled

pytestmark = pytest.mark.slow

CONTRACT = load_text(
    POLICY.replace("limit: 0.02", f"limit: {LIMIT}").replace(
        "observability:", "runtime: [{id: lag, metric: weights_lag, statistic: max, limit: 0}]\nobservability:"
    ),
    "policy.yaml",
)
PAGE = """
globalThis.document = { createElement: (name) => ({ name, text: "", children: [], setAttribute() {},
  append(...all) { for (const one of all) this.children.push(one); } }) };
const said = (node) => typeof node === "string" ? [node] : node.children.flatMap(said);
const { twoCauses } = await import(process.argv[1]);
console.log(JSON.stringify(twoCauses(JSON.parse(process.argv[2])).map((node) => node.name === "table"
  ? node.children[1].children.map(said) : said(node).join(""))));
"""


@pytest.fixture
def answers(open_file: Callable) -> Callable[..., dict[str, Any]]:
    """Returns the API's answer to each path, of an evaluator that was told of simulated sequences."""

    def asked(seed: int, drift: float, aging: float) -> dict[str, Any]:
        core, exporter = Core([CONTRACT], open_file(), external_url="http://evaluator", now=0.0), Memory()
        train, inference, lags = sampled(seed, drift, aging)
        with kc_otel.Recorder(CONTRACT, metric_exporter=exporter, sampling=1.0) as recorder:
            recorder.compare(train, inference, weights=(20, 20 - lags))
        core.metrics(encode_metrics(exporter.exports[-1]))
        core.tick(time.time())
        client = client_of(core)
        return {path: client.get(f"/api/v1/{path}").json() for path in ("verdicts", "incidents")}

    return asked


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("said", PLANTED)
def test_an_incident_and_the_api_say_which_cause_grew(answers: Callable, said: str, seed: int) -> None:
    """Ten of ten for each of the two, and for both; whichever clause the incident is about."""
    found = answers(seed, *PLANTED[said])
    causes = {cell["clause"]: cell["causes"] for cell in found["verdicts"]["verdicts"] if cell["slice"] == "all"}
    assert {clause: of["text"].startswith(f"{said}: ") for clause, of in causes.items()} == {
        "token-tv": True,
        "lag": True,
    }, causes
    (incident,) = found["incidents"]["incidents"]
    told = dict(incident["extents"])
    assert set(told) == ({"lag"} if said.startswith("staleness") else {"token-tv", "lag"})
    for clause, text in told.items():
        assert text.endswith(causes[clause]["text"])
    assert not any(cell["causes"] for cell in found["verdicts"]["verdicts"] if cell["slice"] != "all")


def test_causes_are_told_by_lag(answers: Callable) -> None:
    """A row for each lag that was observed; the intervals hold the truth, which grows with the lag."""
    drift, aging = PLANTED["staleness grew, not the kernels' drift"]
    train, inference, lags = sampled(99, drift, aging, per_lag=1_000)
    of_token = np.maximum(1 - np.exp(train - inference), 0)
    truth = {name: of_token[lags == lag].mean() for name, lag in zip(SHARES, (0, 1, 2, 5, 12), strict=True)}
    for seed in range(5):
        (causes,) = (
            verdict["causes"] for verdict in answers(seed, drift, aging)["verdicts"]["verdicts"]
            if (verdict["clause"], verdict["slice"]) == ("token-tv", "all")
        )  # fmt: skip
        rows = {row["lag"]: row for row in causes["by_lag"]}
        assert {lag: row["share"] for lag, row in rows.items()} == SHARES
        for lag, row in rows.items():
            assert row["lower"] <= truth[lag] <= row["upper"], (lag, row, truth[lag])
        assert {end: rows["0"][end] for end in causes["kernel"]} == causes["kernel"]
        total = sum(row["share"] * row["estimate"] for row in rows.values())
        assert total == pytest.approx(causes["total"]["estimate"])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("said", PLANTED)
def test_the_page_says_which_cause_grew(answers: Callable, said: str) -> None:
    """The phrase of the API, and a row for each lag."""
    (causes,) = (
        verdict["causes"] for verdict in answers(0, *PLANTED[said])["verdicts"]["verdicts"]
        if (verdict["clause"], verdict["slice"]) == ("token-tv", "all")
    )  # fmt: skip
    module = (Path(page.__file__).parent / "causes.js").as_uri()
    done = subprocess.run(
        ["node", "--input-type=module", "-e", PAGE, module, json.dumps(causes)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    title, text, rows = json.loads(done.stdout)
    assert (title, text) == ("Two causes", causes["text"])
    assert text.startswith(f"{said}: ")
    assert {row[0]: float(row[1].removesuffix(" %")) / 100 for row in rows} == {
        lag: pytest.approx(share, abs=0.001) for lag, share in SHARES.items()
    }
    assert float(rows[0][2]) == pytest.approx(causes["kernel"]["estimate"], rel=0.01)
