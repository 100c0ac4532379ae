"""docker-compose.yml, the Dockerfile and the files that they mount; no engine is needed."""

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kc_otel.contract.load import load
from kc_otel.generate.grafana import DATASOURCE_UID
from tests.tools.commands import accepted

COLLECTOR = Path(__file__).parents[2] / "dashboards" / "provisioning" / "collector" / "config.yaml"


@pytest.fixture(scope="module")
def compose(repository: Path) -> dict:
    """The file as YAML 1.1 reads it, anchors merged."""
    return yaml.safe_load((repository / "docker-compose.yml").read_text())


@pytest.mark.slow
def test_docker_compose_itself_reads_it(program, repository: Path) -> None:
    binary = program("docker-compose")
    command = [binary, "--file", str(repository / "docker-compose.yml"), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    assert set(services) == {"evaluator", "collector", "demo", "prometheus", "alertmanager", "tempo", "grafana"}


def test_every_port_is_on_loopback_and_every_image_is_pinned(compose: dict) -> None:
    """Nothing asks for a password, so nothing may be reached from outside; a tag may be moved, a digest not."""
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        digest = "" if service["image"].startswith("kc-otel:") else "@sha256:[0-9a-f]{64}"
        assert re.fullmatch(rf"[\w./-]+:v?\d+\.\d+\.\d+{digest}", service["image"]), name


def test_what_has_a_shell_has_a_health_check(compose: dict) -> None:
    """The two images that hold nothing but one program cannot have one; the rest do, and are waited for."""
    services = compose["services"]
    without = {name for name, service in services.items() if "healthcheck" not in service}
    assert without == {"collector", "tempo"}
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition["condition"] == ("service_started" if other in without else "service_healthy")


def test_every_mounted_file_exists_and_every_volume_is_declared(compose: dict, repository: Path) -> None:
    """A mount of a file that is missing makes the engine create a folder of its name."""
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source, _, _ = volume.partition(":")
            if source.startswith("."):
                assert (repository / source).exists(), source
                assert volume.endswith(":ro")
            else:
                assert source in compose["volumes"]


def test_the_evaluator_understands_how_it_is_started(compose: dict, repository: Path) -> None:
    in_image = json.loads(re.search(r"^CMD (\[.*\])$", (repository / "Dockerfile").read_text(), re.MULTILINE)[1])
    for command in (compose["services"]["evaluator"]["command"], in_image):
        assert command[:2] == ["serve", "/contracts"]
        accepted(command)


def test_the_file_says_which_version_of_compose_it_needs(repository: Path) -> None:
    """`required: false` of env_file is new in Compose 2.24."""
    text = (repository / "docker-compose.yml").read_text()
    assert "required: false" in text
    assert "Compose 2.24" in text.split("name: kc-otel", maxsplit=1)[0]


def test_what_we_build_runs_without_rights(compose: dict, repository: Path) -> None:
    for service in (service for service in compose["services"].values() if service["image"].startswith("kc-otel:")):
        assert (service["cap_drop"], service["read_only"], service["tmpfs"]) == (["ALL"], True, ["/tmp"])
        assert "no-new-privileges:true" in service["security_opt"]
    user = re.findall(r"^USER (.+)$", (repository / "Dockerfile").read_text(), re.MULTILINE)[-1]
    assert min(map(int, user.split(":"))) > 1000


def test_what_is_judged_is_what_rules_and_alerts_are_mounted_for(compose: dict, repository: Path) -> None:
    """A contract without them would break unheard, and rules of one that nobody judges would say that it is silent."""

    def mounted(service: str, target: str) -> set[str]:
        volumes = (volume.split(":") for volume in compose["services"][service]["volumes"])
        places = [(repository / source, Path(to)) for source, to, *_ in volumes if to.startswith(target)]
        return {file.stem for source, to in places for file in (source.iterdir() if source.is_dir() else [to])}

    judged = mounted("evaluator", "/contracts")
    assert judged == {load(repository / "examples" / "traffic" / "contract.yaml").name}
    assert mounted("demo", "/contracts") == judged
    assert mounted("prometheus", "/etc/prometheus/rules") == judged | {"_evaluator"}
    assert mounted("grafana", "/etc/grafana/provisioning/alerting") == judged | {"_evaluator"}


def test_every_service_has_limits(compose: dict) -> None:
    limits = {name: (float(service["cpus"]), service["mem_limit"]) for name, service in compose["services"].items()}
    assert all(0 < cpus <= 2 and re.fullmatch(r"\d+m|1g", memory) for cpus, memory in limits.values())
    memory = yaml.safe_load(COLLECTOR.read_text())["processors"]["memory_limiter"]
    assert memory["limit_mib"] + memory["spike_limit_mib"] < int(limits["collector"][1].removesuffix("m"))


def test_grafana_has_no_account_with_a_default_password(compose: dict) -> None:
    """Anonymous viewers only: no admin is created and nobody can log in."""
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not any("PASSWORD" in name for name in environment)


def test_the_alerts_data_source_is_provisioned(repository: Path) -> None:
    folder = repository / "dashboards" / "provisioning" / "grafana" / "datasources"
    sources = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert {source["uid"]: source["type"] for source in sources}[DATASOURCE_UID] == "prometheus"


def test_addresses_in_the_configurations_are_services(compose: dict, repository: Path) -> None:
    text = "".join(path.read_text() for path in (repository / "dashboards" / "provisioning").rglob("*.yaml"))
    text += compose["services"]["demo"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    hosts = set(re.findall(r"\b([a-z]+):(?:4317|4318|4320|9090|9093|3200)\b", text))
    assert hosts == {"collector", "evaluator", "prometheus", "alertmanager", "tempo"}
    assert hosts <= set(compose["services"])


def test_links_lead_to_where_people_reach_each_page(compose: dict) -> None:
    """Without an external URL messages would link to the name of a container."""
    for name in ("prometheus", "alertmanager", "evaluator"):
        service = compose["services"][name]
        url = f"http://{service['ports'][0].rpartition(':')[0]}"
        assert any(argument.endswith(f"external-url={url}") for argument in service["command"]), name
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_ROOT_URL"] == "http://127.0.0.1:3000/"


@pytest.mark.slow
def test_prometheus_and_alertmanager_accept_their_configurations(program, repository: Path, tmp_path: Path) -> None:
    folder = repository / "dashboards"
    text = (folder / "provisioning" / "prometheus" / "prometheus.yaml").read_text()
    own = tmp_path / "prometheus.yaml"
    own.write_text(text.replace("/etc/prometheus/rules", str(folder / "prometheus" / "rules")))
    other = folder / "provisioning" / "alertmanager" / "alertmanager.yaml"
    checks = ((program("promtool"), "check", "config", own), (program("amtool"), "check-config", other))
    for check in checks:
        done = subprocess.run([*map(str, check)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        broken = tmp_path / "broken.yaml"
        broken.write_text(check[-1].read_text() + "imagined: 1\n")
        command = [*map(str, check[:-1]), str(broken)]
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


def test_the_image_runs_as_nobody_in_particular(repository: Path) -> None:
    lines = (repository / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    assert [stage.split()[1] for stage in stages] == ["$PYTHON", "$PYTHON"]
    (image,) = [line.removeprefix("ARG PYTHON=") for line in lines if line.startswith("ARG PYTHON=")]
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", image)
    final = lines[lines.index(stages[-1]) :]
    check = json.loads(re.search(r"^HEALTHCHECK .*CMD (.+)$", "\n".join(final), re.MULTILINE)[1])
    assert find_spec(check[check.index("-m") + 1]) is not None


def test_the_image_is_built_from_what_the_wheel_needs(repository: Path) -> None:
    allowed = {line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in (repository / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied |= set(line.split()[1:-1])
    assert copied == allowed
    assert all((repository / name).exists() for name in copied)
