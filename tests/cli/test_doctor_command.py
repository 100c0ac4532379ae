"""What `kc-otel doctor` finds: every misconfiguration by its sentence, and nothing where nothing is wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kc_otel.cli.doctor_command import of_evaluator, of_sender
from kc_otel.contract.measuring_paths import Finding, MeasuringPath, left_open
from kc_otel.contract.model import OTHERWISE_REMEDY, Contract
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import open_state
from tests.judge.conftest import Sender, info_request
from tests.tools.contracts import contract_of

POLICY = partial(
    contract_of,
    kernels={"train": {"engine": "torch", "dtype": "float32"}, "inference": {"engine": "vllm", "dtype": "bfloat16"}},
    slices={"code": {"where": {"task": "code"}}},
    numerical=[{"id": "logits", "metric": "logit_half_range", "statistic": "p99", "limit": 0.2}],
    observability={"heartbeat": "30s"},
)
TOKEN_TV = {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}


@pytest.fixture
def contract() -> Contract:
    return POLICY(statistical=[TOKEN_TV])


def errors(found: Iterator[Finding]) -> list[str]:
    listed = [finding for finding in found if finding.level != "ok"]
    assert all(finding.remedy for finding in listed)
    return [finding.what for finding in listed]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_SDK_DISABLED": "TRUE"}, "OTEL_SDK_DISABLED=true turns every recorder off"),
        ({"OTEL_METRICS_EXPORTER": "none"}, "OTEL_METRICS_EXPORTER=none sends nothing to an evaluator"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/json is not supported"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, "usual port of http/protobuf, but the protocol is grpc"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4320"},
            "port of the evaluator's page and API, which accept no OTLP",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "a:4317"}, "a:4317 has no scheme, so gRPC uses TLS"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT": "a:4318"},
            "a:4318 has no scheme, so HTTP cannot use it",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"}, "has no host"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:port"}, "has no host"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a:4318"},
            "has no path, and exporters add none",
        ),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/v1/metrics"},
            "exporters append /v1/metrics a second time",
        ),
        ({"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}, "observations of a lost export stay lost"),
        (
            {"OTEL_METRIC_EXPORT_INTERVAL": "60000"},
            "exports are 60 s apart, and a pair is NO_DATA after 30s of silence",
        ),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "is not a positive number of milliseconds"),
        ({"KC_OTEL_CONTRACT": "/nowhere.yaml"}, "KC_OTEL_CONTRACT=/nowhere.yaml cannot be loaded"),
        ({"KC_OTEL_CONTRACT": "/nowhere.yaml", "VLLM_PLUGINS": "a,b"}, "VLLM_PLUGINS=a,b keeps vLLM from loading"),
    ],
)
def test_what_an_environment_does_to_a_recorder(contract: Contract, environment: dict[str, str], said: str) -> None:
    misdirected = any(name.endswith("ENDPOINT") for name in environment)
    found = errors(of_sender(environment, [contract], refused=lambda: "code: 404" if misdirected else ""))
    assert any(said in text for text in found), found


def test_a_recorder_that_is_turned_off_is_not_said_to_send(contract: Contract) -> None:
    (found,) = of_sender({"OTEL_SDK_DISABLED": "true"}, [contract], refused=str)
    assert found.level == "error"


def test_grpc_without_tls_needs_no_scheme(contract: Contract) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "a:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    assert errors(of_sender(environment, [contract], refused=str)) == []


def test_an_environment_with_nothing_wrong(contract: Contract) -> None:
    (found,) = of_sender({}, [contract], refused=str)
    place = "localhost:4317 (the default, as OTEL_EXPORTER_OTLP_ENDPOINT is not set)"
    accepted = f"recorders in this environment send grpc to {place}, and an export without metrics was accepted"
    assert (found.level, found.what) == ("ok", accepted)


def test_an_endpoint_is_only_called_wrong_where_it_does_not_accept_an_export() -> None:
    """A usual port of something else may be served otherwise, and one's own port may not be."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}
    assert errors(of_sender(environment, refused=str)) == []
    usual, refused = errors(of_sender(environment, refused=lambda: "StatusCode.UNAVAILABLE"))
    assert "usual port of http/protobuf" in usual
    assert refused.endswith(
        "send grpc to a:4318, and an export without metrics was not accepted: StatusCode.UNAVAILABLE"
    )
    (found,) = errors(of_sender({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:24318"}, refused=lambda: "no answer in 10 s"))
    assert found.endswith("send grpc to a:24318, and an export without metrics was not accepted: no answer in 10 s")


def test_a_spool_that_cannot_be_written_is_found(contract: Contract, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(contract.model_dump_json(by_alias=True))
    environment = {
        "KC_OTEL_CONTRACT": str(tmp_path / "policy.yaml"),
        "KC_OTEL_SPOOL": str(tmp_path / "policy.yaml" / "s"),
    }
    found = errors(of_sender(environment, refused=str))
    assert any(f"the spool {tmp_path}/policy.yaml/s cannot be written" in text for text in found)
    environment["KC_OTEL_SPOOL"] = str(tmp_path / "deep" / "spool.sqlite")
    assert not any("spool" in text for text in errors(of_sender(environment, refused=str)))
    assert not (tmp_path / "deep").exists()


def test_a_plugin_that_vllm_would_not_load_is_found(
    contract: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.yaml").write_text(contract.model_dump_json(by_alias=True))
    environment = {"KC_OTEL_CONTRACT": str(tmp_path / "policy.yaml"), "KC_OTEL_SPOOL": str(tmp_path / "spool.sqlite")}
    for installed, said in ((["kc_otel"], False), ([], True)):
        monkeypatch.setattr("kc_otel.cli.doctor_command.entry_points", lambda installed=installed, **_: installed)
        found = list(of_sender(environment, refused=str))
        assert any(finding.what == "this Python environment has no vLLM plugin kc_otel" for finding in found) is said
    assert any(finding.remedy == "install kc-otel where vLLM is installed" for finding in found)


def test_what_a_path_never_measures_is_said(contract: Contract) -> None:
    found = errors(of_sender({}, [contract], MeasuringPath.TRL, str))
    assert found == ["policy: trl never measures clause logits"]
    said = [note.what for note in of_sender({}, [contract], MeasuringPath.TRL, str) if note.level == "ok"]
    assert said[-1] == "policy: slices need the attribute `task` of every sequence: a column of the dataset"


class Running:
    """An evaluator's API, asked as the command asks it."""

    def __init__(self, contract: Contract, *contracts: Contract) -> None:
        self.now, self.counts = time.time(), Counter()
        self.core = Core([contract, *contracts], open_state(None), external_url="", now=self.now)
        self._client = TestClient(make_api(self.core, lambda: read(self.core, self.counts, Counter()), Changes(), "0"))

    def send(self, sender: Sender, values: Any = (0.001,) * 600) -> None:
        for part in ((), values):
            outcome = self.core.metrics(sender.request(self.now, part), self.now)
            self.counts["grpc", "partial" if outcome.rejected else "accepted"] += 1
            self.now += 0.001

    def findings(self, *contracts: Contract) -> list[Finding]:
        served = self._get("contracts")["contracts"]
        now = self._get("overview")["now"]
        verdicts = self._get("verdicts")["verdicts"]
        return list(of_evaluator(self._get("health"), served, verdicts, now, contracts))

    def _get(self, path: str) -> Any:
        return self._client.get(f"/api/v1/{path}").json()


@pytest.fixture
def running(contract: Contract) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(*contracts: Contract) -> Running:
        made.append(Running(*(contracts or (contract,))))
        return made[-1]

    yield make
    for running_evaluator in made:
        running_evaluator.core.connection.close()


@pytest.mark.slow
def test_an_evaluator_that_nothing_reaches(running: Callable[..., Running]) -> None:
    found = errors(iter(running().findings()))
    assert found[:2] == [
        "nothing has been judged yet: the log of the evaluator may say why",
        "the evaluator had accepted no OTLP request before this check",
    ]


def test_kernels_that_are_not_what_the_contract_declares(running: Callable[..., Running]) -> None:
    """As on the page and in `status`, with what to do."""
    driven = running()
    assert driven.core.metrics(info_request(driven.now, 1), driven.now).rejected == 0
    driven.core.tick(driven.now)
    (found,) = [finding for finding in driven.findings() if "declared" in finding.what]
    assert (found.level, found.remedy) == ("warning", OTHERWISE_REMEDY)
    assert found.what == f"policy, kernel vllm fp8 ({'b' * 12}): dtype bfloat16 is declared, and fp8 reported"


def test_a_recorder_that_died_beside_others_has_a_remedy_of_its_own(running: Callable[..., Running]) -> None:
    driven = running()
    for seconds, *names in ((0.0, "dead", "healthy"), (120.0, "healthy")):
        driven.now += seconds
        for name in names:
            driven.core.metrics(info_request(driven.now, 1, name), driven.now)
        driven.core.tick(driven.now)
    (found,) = [finding for finding in driven.findings() if "silent" in finding.what]
    said = "1 of 2 recorders is silent without having shut down: dead for 2m"
    assert found.what == f"policy, kernel vllm fp8 ({'b' * 12}): {said}"
    assert "`recorder.shutdown()`" in found.remedy
    assert "the contract" not in found.remedy


def test_an_evaluator_that_others_send_to(running: Callable[..., Running]) -> None:
    driven = running()
    driven.send(Sender("http.server.request.duration", start=driven.now - 5))
    assert any("none has a point of a served contract" in said for said in errors(iter(driven.findings())))


def test_what_reaches_only_half(running: Callable[..., Running]) -> None:
    driven = running()
    driven.send(Sender(start=driven.now - 5))
    driven.send(Sender(start=driven.now - 5, contract="other"))
    driven.send(Sender(start=driven.now - 5, slice="poetry"))
    driven.counts["http", "throttled"] += 1
    driven.core.tick(driven.now)
    other, changed = POLICY("other", statistical=[TOKEN_TV]), POLICY(statistical=[{**TOKEN_TV, "limit": 0.03}])
    found = errors(iter(driven.findings(other, changed)))
    for said in (
        "the evaluator does not serve other, only policy",
        "the evaluator serves version 1 of policy, which differs from this file",
        "1 requests were rejected: throttled",
        "2 points were rejected or not judged: unknown_contract",
        "2 points were rejected or not judged: unknown_slice",
        "policy: no data for logits",
        "policy: slice code matches nothing that is measured (task: code)",
    ):
        assert any(said in sentence for sentence in found), (said, found)
    assert len(found) == 7
    assert not any("matches nothing" in said for said in errors(iter(running().findings())))


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("no observations", "pass these attributes"),
        ("no observations; a recorder applies version 1", "a recorder applies version 1"),
        ("no report for 5m: its recorder died; others report", "pass these attributes"),
    ],
)
def test_a_slice_without_data_has_the_remedy_of_its_verdict(why: str, remedy: str) -> None:
    """Attributes are not to blame where the recorder defines the slice as another version of the contract does."""
    served = [{"name": "policy", "slices": {"code": {"task": "code"}}, "kernels": []}]
    cell = {"contract": "policy", "clause": "tv", "kernel_inference": "b", "kernel_train": "a", "gone": False}
    cell["no_traffic"] = False
    verdicts = [
        {**cell, "slice": "all", "status": "PASS", "observed": True, "reason": ""},
        {**cell, "slice": "code", "status": "NO_DATA", "observed": False, "reason": why},
    ]
    never = {**cell, "clause": "first-token", "status": "NO_DATA", "observed": False, "reason": "none yet; scrape it"}
    verdicts[:0] = [{**never, "slice": slice} for slice in ("all", "code")]  # of which the slice tells nothing
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {}, "outbox": []}
    found = list(of_evaluator(health | {"requests": {}, "points": {}}, served, verdicts, 100.0))
    assert [finding.remedy.startswith(remedy) for finding in found if "matches nothing" in finding.what] == [True]


def test_a_kernel_that_gets_no_requests_as_ordered_is_no_error() -> None:
    """The page and `status` say NO TRAFFIC."""
    served = [{"name": "policy", "slices": {}, "kernels": []}]
    cell = {"contract": "policy", "clause": "tv", "slice": "all", "kernel_inference": "b", "kernel_train": "a"}
    verdict = cell | {"status": "NO_DATA", "observed": True, "reason": "no observations", "gone": False}
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {}, "outbox": [], "points": {}}
    for ordered, level, why in ((True, "warning", "routers keep the requests"), (False, "error", "no observations")):
        cells = [verdict | {"no_traffic": ordered}]
        found = {finding.what: finding for finding in of_evaluator(health | {"requests": {}}, served, cells, 100.0)}
        lacking = found["policy: no data for tv"]
        assert (lacking.level, lacking.remedy.startswith(why)) == (level, True)


def test_an_evaluator_with_nothing_wrong(running: Callable[..., Running], contract: Contract) -> None:
    driven = running()
    for metric in ("kc.drift.tv_token", "kc.drift.logit_half_range"):
        for slice in ("all", "code"):
            driven.send(Sender(metric, slice=slice, start=driven.now - 5))
    driven.core.tick(driven.now)
    assert errors(iter(driven.findings(contract))) == []


@pytest.mark.parametrize("outcome", ["baseline", "behind", "unjudged"])
def test_points_of_which_none_is_judged_are_no_good_news(outcome: str) -> None:
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {}, "outbox": []}
    health |= {"requests": {"grpc accepted": 10}, "points": {outcome: 500}}
    found = list(of_evaluator(health, [], [], 100.0))
    assert "500 points of served contracts have arrived, and none is judged" in [finding.what for finding in found]
    assert not any("are judged" in finding.what for finding in found if finding.level == "ok")


def test_no_cause_of_malformed_points_is_made_up() -> None:
    """There are many, and the evaluator has kept which one it is."""
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {}, "outbox": [], "requests": {}}
    health["points"] = {"malformed": 5}
    found = {finding.what: finding.remedy for finding in of_evaluator(health, [], [], 9.0)}
    remedy = found["5 points were rejected or not judged: malformed"]
    assert remedy == "points are impossible or not as OTLP has them; `kc-otel status` says of whom, and what is wrong"


def test_a_slice_whose_sequences_fail_their_checks_has_matched() -> None:
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {}, "outbox": [], "requests": {}}
    served = [{"name": "policy", "kernels": [], "slices": {"code": {"task": "code"}, "long": {"task": "long"}}}]
    pair = {
        "contract": "policy",
        "clause": "token-tv",
        "kernel_train": "a",
        "kernel_inference": "b",
        "gone": False,
        "no_traffic": False,
    }
    verdicts = [
        pair | {"slice": slice, "status": status, "observed": status == "PASS", "reason": ""}
        for slice, status in (("all", "PASS"), ("code", "INVALID_INPUT"), ("long", "NO_DATA"))
    ]
    found = [finding.what for finding in of_evaluator(health | {"points": {}}, served, verdicts, 100.0)]
    assert [said for said in found if "matches nothing" in said] == [
        "policy: slice long matches nothing that is measured (task: long)"
    ]


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        ("INVALID_INPUT", "INVALID INPUT, placeholder: 9 sequences", ("error", "policy: no valid data for token-tv")),
        ("NO_DATA", "no report for 5m", ("error", "policy: no data for token-tv")),
        ("NO_DATA", "the run ended: its last recorder shut down 5m ago", ("warning", "policy: no data for token-tv")),
        ("NO_DATA", "next report due by 08:55:40 UTC", ("warning", "policy: no data for token-tv")),
        ("NO_DATA", "nothing to measure: all sequences are greedy", ("warning", "policy: no data for token-tv")),
        ("NO_DATA", "requests are kept away", ("warning", "policy: no data for token-tv")),
    ],
)
def test_data_that_are_missing_or_invalid_are_an_error_unless_that_is_meant(
    contract: Contract, status: str, reason: str, said: tuple[str, str]
) -> None:
    """Of the contracts that are asked about: what another one lacks is no error of theirs."""
    health: dict[str, Any] = {"evaluated_at": 100.0, "failures": {}, "invalid": {"other": {"nan": 3}}, "outbox": []}
    served = [{"name": name, "hash": contract.hash, "kernels": [], "slices": {}} for name in ("policy", "other")]
    cell = {"clause": "token-tv", "slice": "all", "kernel_train": "a", "kernel_inference": "b", "gone": False}
    cell["no_traffic"] = reason == "requests are kept away"
    cells = [
        cell | {"contract": name, "status": status, "observed": False, "reason": reason} for name in ("policy", "other")
    ]
    health |= {"requests": {"grpc accepted": 1}, "points": {"accepted": 1}}
    found = list(of_evaluator(health, served, cells, 100.0, [contract]))
    assert [(finding.level, finding.what) for finding in found if finding.level != "ok"] == [said]


def test_what_a_version_lacks_that_another_measures(running: Callable[..., Running]) -> None:
    driven = running()
    for metric in ("kc.drift.tv_token", "kc.drift.logit_half_range"):
        for slice in ("all", "code"):
            driven.send(Sender(metric, slice=slice, start=driven.now - 5))
    driven.send(Sender(inference="c" * 12, start=driven.now - 5))
    driven.core.tick(driven.now)
    (said,) = errors(iter(driven.findings()))
    lacking = "logits on all and code; token-tv on code"
    assert said == f"policy: kernel {'c' * 12} against {'a' * 12} was not measured where another one was: {lacking}"


XARGS = "clients send it in vllm_xargs or as baggage, or KC_OTEL_ATTRIBUTES names a header"


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (
            "loop",
            {
                "no process carries out route:train-kernel",
                "clause weights-lag needs weights= of compare",
                "slices by `lag` need weights= of compare",
            },
        ),
        ("trl", {"no process carries out route:train-kernel"}),
        (
            "verl",
            {
                "no process carries out route:train-kernel",
                "no process carries out halt",
                "no process carries out quarantine-rollouts",
                "no process carries out sample-more",
            },
        ),
        (
            "trainer",
            {
                "no process carries out route:train-kernel",
                "no process carries out quarantine-rollouts",
                "no process carries out sample-more",
            },
        ),
        (
            "vllm",
            {
                "vllm never measures clause weights-lag",
                "no process carries out halt",
                "no process carries out quarantine-rollouts",
                "no process carries out sample-more",
                f"slices need the attribute `lag` of every sequence: {XARGS}",
            },
        ),
    ],
)
def test_what_a_way_of_measuring_leaves_to_somebody_is_said(way: str, said: set[str]) -> None:
    """A loop has to pass the versions of its weights; a trainer has no router, and served requests no trainer.

    The plugin of verl follows no directive, and nobody trains on the samples of the callback.
    """
    contract = contract_of(
        slices={"older": {"where": {"lag": ">= 1"}}},
        statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}],
        runtime=[{"id": "weights-lag", "metric": "weights_lag", "limit": 1}],
        escalation=[
            {"on": "fail", "do": [{"route": "train-kernel"}, "halt", "notify", "quarantine-rollouts", "sample-more"]}
        ],
    )
    found = {finding.what.removeprefix("policy: ") for finding in left_open(contract, MeasuringPath(way))}
    assert found == said


def test_rollouts_are_left_out_where_a_clause_can_judge_one() -> None:
    """A trainer that is to leave rollouts out needs a clause that a single sequence can break."""
    steps = {"escalation": [{"on": "fail", "do": ["quarantine-rollouts"]}], "assumptions": {"reward_range": [0, 1]}}
    of_rewards = contract_of(statistical=[{"id": "reward", "metric": "reward_drift", "limit": 0.1}], **steps)
    of_tokens = contract_of(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}], **steps)
    said = [
        [finding.what for finding in left_open(contract, MeasuringPath.TRL) if "carries out" in finding.what]
        for contract in (of_rewards, of_tokens)
    ]
    assert said == [["policy: no process carries out quarantine-rollouts"], []]
