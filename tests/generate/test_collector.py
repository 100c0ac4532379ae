"""A Collector in front of several evaluators: every contract in one place, and the verdicts of one process.

No Collector that has the routing connector can be installed from a package registry. The configuration is therefore
read here by a reading of what the documentation of its three components says, small enough to be compared with it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load_all
from kc_otel.generate.collector import collector_files, placed
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status
from tests.tools.commands import commands
from tests.tools.verdicts import verdicts_of

NOW = 1_800_000_000.0
TTFT = "gen_ai.server.time_to_first_token"
ADDRESSES = ["judge-0.kc:4317", "judge-1.kc:4317"]
CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: {name}, version: 1, owner: team}}
kernels: {{train: {{engine: torch}}, inference: {{engine: vllm}}}}
statistical: [{{id: token-tv, metric: tv_token, unit: token, limit: 0.02}}]
{runtime}
observability: {{window: 5m, long_window: 1h, min_samples: 100, heartbeat: 60s}}
"""
NAMES = ("policy-a", "policy-b", "policy-c", "reward")


def texts() -> dict[str, str]:
    slow = f"runtime: [{{id: ttft, metric: {TTFT}, statistic: p99, limit: 800ms}}]"
    return {name: CONTRACT.format(name=name, runtime=slow if name == "policy-a" else "") for name in NAMES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in texts().items():
        (tmp_path / "contracts").mkdir(exist_ok=True)
        (tmp_path / "contracts" / f"{name}.yaml").write_text(text)
    return tmp_path


def made(folder: Path, *addresses: str) -> dict[str, str]:
    files = collector_files(load_all([folder / "contracts"]), texts(), addresses or ADDRESSES)
    return {str(file.path): file.text for file in files}


def histogram(rng: np.random.Generator, contract: str | None, metric: str, mean: float, at: float):
    """One process' cumulative point, as an OTLP metric of one point."""
    message = ExportMetricsServiceRequest()
    added = message.resource_metrics.add().scope_metrics.add().metrics.add(name=metric, unit="1")
    added.exponential_histogram.aggregation_temporality = 2
    point = added.exponential_histogram.data_points.add(start_time_unix_nano=int(NOW * 1e9))
    point.time_unix_nano = int(at * 1e9)
    labels = {"kc.slice": "all", "kc.kernel.train": "a" * 12, "kc.kernel.inference": "b" * 12}
    for key, value in (labels | {"kc.contract": contract} if contract else {}).items():
        point.attributes.add(key=key).value.string_value = value
    values = np.clip(rng.normal(mean, mean / 10, 500), 1e-4, 1.0)
    buckets = np.ceil(np.log2(values) * 16).astype(int) - 1
    point.scale, point.count, point.sum = 4, values.size, float(values.sum())
    point.positive.offset = int(buckets.min())
    point.positive.bucket_counts.extend(np.bincount(buckets - buckets.min()).tolist())
    return message.resource_metrics[0]


def holds(condition: str, of: dict[str, str], name: str) -> bool:
    """The two forms of OTTL conditions that are generated."""
    if found := re.fullmatch(r'attributes\["kc\.contract"\] == "(.+)"', condition):
        return of.get("kc.contract") == found[1]
    parts = [part.strip() for part in condition.split(" or ")]
    return any(
        name == part.removeprefix('name == "').rstrip('"')
        if part.startswith("name ==")
        else bool(re.search(re.fullmatch(r'IsMatch\(name, "(.+)"\)', part)[1], name))
        for part in parts
    )


def routed(config: dict, request: ExportMetricsServiceRequest) -> dict[str, ExportMetricsServiceRequest]:
    """What each exporter's endpoint gets of a request, one point at a time, by the documented rules."""
    pipelines, connector = config["service"]["pipelines"], config["connectors"]["routing/metrics"]
    (drop,) = config["processors"]["filter/ours"]["metrics"]["metric"]
    found: dict[str, ExportMetricsServiceRequest] = defaultdict(ExportMetricsServiceRequest)
    for resource in request.resource_metrics:
        for metric in resource.scope_metrics[0].metrics:
            if not holds(re.fullmatch(r"not \((.+)\)", drop)[1], {}, metric.name):
                continue
            (point,) = metric.exponential_histogram.data_points
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            for row in connector["table"]:
                of = labels if row["context"] == "datapoint" else {}
                if holds(row["condition"], of, metric.name if row["context"] == "metric" else ""):
                    targets = row["pipelines"]
                    break
            else:
                targets = connector["default_pipelines"]
            for target in targets:
                (exporter,) = pipelines[target]["exporters"]
                found[config["exporters"][exporter]["endpoint"]].resource_metrics.append(resource)
    return found


def test_every_contract_is_judged_in_one_place_as_one_process_would(folder: Path) -> None:
    """Two evaluators behind the Collector say together what one says alone, of a contract's own and of gen_ai.*."""
    files = made(folder)
    config = yaml.safe_load(files["collector/config.yaml"])
    evaluators = {}
    for address in ADDRESSES:
        own = folder / "own" / address
        for path, text in files.items():
            if path.startswith(f"collector/evaluators/{address.replace(':', '-')}/"):
                own.mkdir(parents=True, exist_ok=True)
                (own / Path(path).name).write_text(text)
        evaluators[address] = Evaluator(load_all([own]))
    alone = Evaluator(load_all([folder / "contracts"]))
    rng = np.random.default_rng(0)
    drift = dict(zip(NAMES, (0.004, 0.08, 0.004, 0.08), strict=True))
    request = ExportMetricsServiceRequest()
    for name, mean in drift.items():
        request.resource_metrics.append(histogram(rng, name, "kc.drift.tv_token", mean, NOW + 30))
    request.resource_metrics.append(histogram(rng, None, TTFT, 0.3, NOW + 30))
    request.resource_metrics.append(histogram(rng, "nobody", "kc.drift.tv_token", 0.3, NOW + 30))
    request.resource_metrics.append(histogram(rng, None, "http.server.duration", 0.3, NOW + 30))
    parts = routed(config, request)
    assert set(parts) == set(ADDRESSES)
    alone.ingest_metrics(request, NOW + 31)
    for address, part in parts.items():
        evaluators[address].ingest_metrics(part, NOW + 31)
    verdicts = [verdicts_of(evaluator, NOW + 31) for evaluator in evaluators.values()]
    assert sorted(map(repr, sum(verdicts, ()))) == sorted(map(repr, verdicts_of(alone, NOW + 31)))
    said = {(verdict.cell.contract, verdict.cell.clause): verdict.status for verdict in verdicts_of(alone, NOW + 31)}
    assert {said[name, "token-tv"] for name in ("policy-b", "reward")} == {Status.FAIL}
    assert said["policy-a", "ttft"] is not Status.NO_DATA
    counted = sum((Counter(evaluator.counters) for evaluator in evaluators.values()), Counter())
    assert counted == Counter(accepted=5, unknown_contract=1), "no point twice, none lost, and a stranger's is seen"


def test_spans_follow_their_contract_and_nothing_is_queued(folder: Path) -> None:
    """The table of spans is that of points; exporters answer only after the evaluator did."""
    config = yaml.safe_load(made(folder)["collector/config.yaml"])
    spans, points = (config["connectors"][f"routing/{signal}"]["table"] for signal in ("traces", "metrics"))
    assert {row["context"] for row in spans} == {"span"}
    assert [(row["condition"], row["pipelines"][0].replace("traces", "metrics")) for row in spans] == [
        (row["condition"], row["pipelines"][0]) for row in points if row["context"] == "datapoint"
    ]
    assert all(not exporter["sending_queue"]["enabled"] for exporter in config["exporters"].values())
    used = {part for pipeline in config["service"]["pipelines"].values() for part in pipeline.get("processors", ())}
    assert used == set(config["processors"]) == {"memory_limiter", "filter/ours"}, "no batch, which would queue"


def test_every_part_that_is_named_exists(folder: Path) -> None:
    """Pipelines, exporters, connectors and processors refer to what is defined."""
    config = yaml.safe_load(made(folder)["collector/config.yaml"])
    pipelines = config["service"]["pipelines"]
    known = {*config["exporters"], *config["connectors"], *config["receivers"], *config["processors"]}
    for pipeline in pipelines.values():
        assert {*pipeline["receivers"], *pipeline.get("processors", ()), *pipeline["exporters"]} <= known
    for connector in config["connectors"].values():
        targets = {name for row in connector["table"] for name in row["pipelines"]}
        assert targets | {*connector.get("default_pipelines", ())} <= set(pipelines)


@given(st.integers(7, 90), st.integers(1, 7), st.integers(0, 1000))
def test_contracts_are_spread_evenly_whatever_the_order(contracts: int, evaluators: int, seed: int) -> None:
    """Every contract has one place, and counts differ by one at most."""
    names = [f"contract-{seed}-{number}" for number in range(contracts)]
    addresses = [f"judge-{number}:4317" for number in range(evaluators)]
    places = placed(names[::-1], addresses)
    assert sorted(sum(places.values(), ())) == sorted(names)
    sizes = [len(place) for place in places.values()]
    assert max(sizes) - min(sizes) <= 1
    assert {address: places[address] for address in addresses} == placed(names, addresses[::-1])


def test_one_more_evaluator_moves_few_contracts() -> None:
    """Of 300 contracts on five evaluators a sixth one gets fifty; two thirds of all stay where they were."""
    names = [f"contract-{number}" for number in range(300)]
    before, after = (placed(names, [f"judge-{at}:4317" for at in range(count)]) for count in (5, 6))
    of = {name: address for address, mine in before.items() for name in mine}
    stayed = sum(of[name] == address for address, mine in after.items() for name in mine)
    assert stayed > 200


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (["judge-0"], "'judge-0': is not host:port"),
        (["judge:4317", "judge:4317"], "name at least one, and each once"),
        ([], "name at least one"),
        ([f"judge-{number}:4317" for number in range(5)], "5 evaluators for 4 contracts"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, addresses: list[str], said: str) -> None:
    """No address, one twice, none, or more than there are contracts."""
    with pytest.raises(ValueError, match=said):
        collector_files(load_all([folder / "contracts"]), texts(), addresses)


def test_the_command_writes_it_and_refuses_contracts_that_are_left_over(folder: Path) -> None:
    """With another evaluator some contracts move; a copy that stays would be judged twice."""
    out, contracts = folder / "out", folder / "contracts"
    words = ("generate", "collector", contracts, "--evaluator", "judge-0:4317", "--out", out)
    run = commands("generate")
    assert run(*words)[0] == 0
    assert len(list((out / "collector" / "evaluators" / "judge-0-4317").iterdir())) == 4
    code, _, said = run(*words, "--evaluator", "judge-1:4317")
    assert (code, "is now judged elsewhere, or not at all; remove the file" in said) == (2, True)
