"""How people are told of Grafana's alerts: contact points, policies, templates, in provisioning form."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.grafana.alerting import alerting_file
from kc_otel.generate.grafana.notifications import notifications_file


@pytest.fixture(scope="module")
def text(policy: Contract) -> str:
    """The file."""
    return notifications_file([policy]).text


@pytest.fixture(scope="module")
def content(text: str) -> dict:
    """The file as Grafana reads it."""
    return yaml.safe_load(text)


def routes(policy: dict) -> list[dict]:
    """Every route below a policy."""
    return [inner for route in policy.get("routes", []) for inner in (route, *routes(route))]


def receivers_of(tree: dict, labels: dict[str, str]) -> set[str]:
    """Who is told of an alert: Alertmanager's algorithm on `object_matchers`."""

    def matches(route: dict) -> bool:
        return all(
            re.fullmatch(value if operator == "=~" else re.escape(value), labels.get(name, "")) is not None
            for name, operator, value in route["object_matchers"]
        )

    told: set[str] = set()
    for route in tree.get("routes", []):
        if matches(route):
            told |= receivers_of(route, labels)
            if not route.get("continue"):
                break
    return told or {tree["receiver"]}


def test_there_is_a_contact_point_for_people_and_one_per_webhook(content: dict) -> None:
    """Names are what the policies use; uids are unique and fit Grafana's column."""
    assert content["apiVersion"] == 1
    assert [point["name"] for point in content["contactPoints"]] == ["kernel-contracts", "kernel-contracts-pager"]
    uids = [receiver["uid"] for point in content["contactPoints"] for receiver in point["receivers"]]
    assert len(set(uids)) == len(uids)
    assert max(map(len, uids)) <= 40
    named = {route["receiver"] for route in routes(content["policies"][0])} | {content["policies"][0]["receiver"]}
    assert named == {point["name"] for point in content["contactPoints"]}


def test_secrets_and_addresses_come_from_the_environment(content: dict, text: str) -> None:
    """Nothing secret is in the file; each webhook is signed with a time, and the variables are listed at the top."""
    for point in content["contactPoints"]:
        (receiver,) = point["receivers"]
        settings = receiver["settings"]
        assert receiver["type"] == "webhook"
        variables = (settings["url"], settings["hmacConfig"]["secret"])
        assert all(re.fullmatch(r"\$KC_OTEL_GRAFANA_WEBHOOK[A-Z0-9_]*_(URL|SECRET)", value) for value in variables)
        assert all(f"#   {value[1:]}\n" in text for value in variables)
        assert set(settings["hmacConfig"]) == {"secret", "header", "timestampHeader"}


def test_nothing_else_looks_like_a_variable_to_grafana(text: str, policy: Contract) -> None:
    """Grafana takes what follows a `$` for an environment variable, in labels and settings alike."""
    assert set(re.findall(r"\$\w*", text)) == {
        f"$KC_OTEL_GRAFANA_WEBHOOK{name}_{what}" for name in ("", "_PAGER") for what in ("URL", "SECRET")
    }
    for rule in yaml.safe_load(alerting_file(policy).text)["groups"][0]["rules"]:
        assert not any("$" in value for value in rule["labels"].values())
        assert not any("${" in value for value in rule["annotations"].values())


def test_each_part_satisfies_the_schema_of_grafanas_own_model(content: dict, schemas: Path) -> None:
    """Files wrap what the HTTP API takes: without the wrapper it has the API's shape."""
    schema = json.loads((schemas / "grafana-jsonschema" / "alerting.jsonschema.json").read_text())

    def errors(definition: str, value: dict) -> list[str]:
        validator = jsonschema.Draft7Validator({**schema, "$ref": f"#/definitions/{definition}"})
        plain = {key: part for key, part in value.items() if key != "orgId"}
        return [error.message for error in validator.iter_errors(plain)]

    for point in content["contactPoints"]:
        for receiver in point["receivers"]:
            assert errors("ContactPoint", {"name": point["name"], **receiver}) == []
    assert [errors("NotificationPolicy", policy) for policy in content["policies"]] == [[]]
    assert [errors("NotificationTemplate", template) for template in content["templates"]] == [[]]
    assert errors("NotificationTemplate", {"name": 1})


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"step": "1", "severity": "warning"}, {"kernel-contracts"}),
        ({"step": "2", "severity": "critical"}, {"kernel-contracts-pager"}),
        ({"step": "4", "severity": "info"}, {"kernel-contracts"}),
        ({"step": "9", "severity": "critical"}, {"kernel-contracts"}),
        ({"alertname": "KernelContractRolledBack, warning", "severity": "warning"}, {"kernel-contracts-pager"}),
    ],
)
def test_each_step_reaches_whom_the_policy_names(content: dict, labels: dict, expected: set) -> None:
    """`notify` reaches people, `webhook: pager` the pager and nobody else, and no alert is lost."""
    alert = {"grafana_folder": "Kernel contracts", "contract": "policy-7b", **labels}
    assert receivers_of(content["policies"][0], alert) == expected


def test_a_step_that_notifies_and_calls_a_webhook_reaches_both(policy: Contract) -> None:
    """Routes of webhooks go on to the next."""
    both = policy.escalation[1].model_copy(update={"do": (*policy.escalation[0].do, *policy.escalation[1].do)})
    content = yaml.safe_load(notifications_file([policy.model_copy(update={"escalation": (both,)})]).text)
    alert = {"grafana_folder": "Kernel contracts", "contract": "policy-7b", "step": "1", "severity": "critical"}
    assert receivers_of(content["policies"][0], alert) == {"kernel-contracts", "kernel-contracts-pager"}


def test_reminders_come_as_often_as_the_step_says(policy: Contract) -> None:
    """Steps that share an endpoint and not their reminders have a route each, and each alert follows one of them."""
    first, second, *_ = policy.escalation
    steps = (
        second,
        second.model_copy(update={"repeat": 600.0}),
        second.model_copy(update={"repeat": 0.0}),
        first.model_copy(update={"repeat": 600.0}),
        first,
    )
    content = yaml.safe_load(notifications_file([policy.model_copy(update={"escalation": steps})]).text)
    (branch,) = content["policies"][0]["routes"]
    found = {
        (number, route["receiver"]): route["repeat_interval"]
        for route in branch["routes"]
        for name, _, numbers in route["object_matchers"]
        if name == "step"
        for number in numbers.split("|")
    }
    pager, people = "kernel-contracts-pager", "kernel-contracts"
    assert found == {
        ("1", pager): "4h",
        ("2", pager): "10m",
        ("3", pager): "5d",
        ("4", people): "10m",
        ("5", people): "4h",
    }


def test_without_contracts_there_is_still_a_whole_file() -> None:
    """No endpoints, no routes, and what the root names is there."""
    content = yaml.safe_load(notifications_file([]).text)
    assert [point["name"] for point in content["contactPoints"]] == [content["policies"][0]["receiver"]]
    assert content["policies"][0]["routes"] == []


@pytest.mark.slow
def test_alertmanager_understands_the_same_tree(program, content: dict, tmp_path: Path) -> None:
    """Grafana's policies are Alertmanager's: amtool takes the routes, and finds the same receivers."""

    def plain(route: dict) -> dict:
        own = {key: value for key, value in route.items() if key not in {"orgId", "object_matchers", "routes"}}
        matchers = [f'{name}{operator}"{value}"' for name, operator, value in route.get("object_matchers", [])]
        return {**own, "matchers": matchers, "routes": [plain(child) for child in route.get("routes", [])]}

    def amtool(*arguments: str) -> str:
        command = [program("amtool"), *arguments]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tree,) = content["policies"]
    root = {key: value for key, value in plain(tree).items() if key != "matchers"}
    config = {"route": root, "receivers": [{"name": point["name"]} for point in content["contactPoints"]]}
    path = tmp_path / "alertmanager.yaml"
    path.write_text(yaml.safe_dump(config))
    assert "SUCCESS" in amtool("check-config", path)
    for step, expected in (("1", "kernel-contracts"), ("2", "kernel-contracts-pager"), ("4", "kernel-contracts")):
        labels = ('grafana_folder="Kernel contracts"', "contract=policy-7b", f"step={step}", "severity=critical")
        found = amtool("config", "routes", "test", f"--config.file={path}", *labels)
        assert found.split() == [expected]


@pytest.mark.slow
def test_templates_render(program, content: dict, tmp_path: Path) -> None:
    """Grafana's templates are Alertmanager's with a few fields more: amtool renders title and message."""
    # PanelURL is one of the fields that Alertmanager does not have.
    template = content["templates"][0]["template"].replace(".PanelURL", ".GeneratorURL")
    (tmp_path / "one.tmpl").write_text(template)
    labels = {"contract": "policy-7b", "clause": "token-tv", "slice": "code", "severity": "critical"}
    annotations = {"summary": "token-tv is broken", "description": "Mean of", "runbook": "1. Look."}
    firing = {"status": "firing", "labels": labels, "annotations": annotations, "generatorURL": "http://panel"}
    data = {"status": "firing", "alerts": [firing], "commonLabels": labels, "receiver": "x"}
    (tmp_path / "data.json").write_text(json.dumps(data))

    def rendered(name: str) -> str:
        command = [program("amtool"), "template", "render", f"--template.glob={tmp_path}/*.tmpl"]
        command += [f'--template.text={{{{ template "kernel_contracts.{name}" . }}}}']
        command += [f"--template.data={tmp_path}/data.json"]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert rendered("title").strip() == "[FIRING: 1] policy-7b / token-tv / code"
    message = rendered("message")
    for part in ("FIRING, critical: token-tv is broken", "1. Look.", "Panel: http://panel"):
        assert part in message, message
    many = [{**firing, "annotations": {**annotations, "summary": f"it is broken on {n}"}} for n in range(45)]
    del labels["slice"]
    (tmp_path / "data.json").write_text(json.dumps({**data, "alerts": many}))
    assert rendered("title").strip() == "[FIRING: 45] policy-7b / token-tv"
    lines = rendered("message").splitlines()
    assert lines[:10] == [f"FIRING, critical: it is broken on {n}" for n in range(10)]
    assert lines[10] == "and others: 45 fire, 0 are resolved"
    assert lines.count("1. Look.") == 1
    (tmp_path / "data.json").write_text(
        json.dumps({**data, "status": "resolved", "alerts": [{**firing, "status": "resolved"}]})
    )
    assert rendered("message").strip() == "RESOLVED, critical: token-tv is broken"
