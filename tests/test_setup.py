"""What `make` does before anything else: the system's packages are seen to, or one line says what to install.

The scripts run with a PATH of stand-ins, each of which writes down how it was called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ALL = {"make", "python3.11", "redis-server", "openssl", "ip", "libnuma.so.1", "libibverbs.so.1", "libcurl.so.4"}
PACKAGES = {
    "make": "make",
    "python3.11": "python3-venv",
    "libnuma.so.1": "libnuma1",
    "redis-server": "redis-server",
    "openssl": "openssl",
    "ip": "iproute2",
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
}
UPDATE = "apt-get update -qq"
INSTALL = "apt-get install -qq --yes --no-install-recommends"

PYTHON = """\
case "$2" in
    *CDLL*) [ -e "$MACHINE/$3" ] ;;
    *venv*) [ -e "$MACHINE/python3.11" ] ;;
esac
"""
"""Loads a library if the machine has it, and can make a `.venv` if it is Python 3.11."""


class Machine:
    """A machine on which only these commands and libraries are there, and a checkout without `.venv`."""

    def __init__(self, directory: Path, has: Collection[str], user: str = "root") -> None:
        self.bin, self.there, self.log = directory / "bin", directory / "machine", directory / "log"
        self.checkout = directory / "checkout"
        shutil.copytree(REPOSITORY / "scripts", self.checkout / "scripts")
        shutil.copy(REPOSITORY / "Makefile", self.checkout)
        shutil.copy(REPOSITORY / "pyproject.toml", self.checkout)
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

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "MACHINE": str(self.there)}
        return subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=60)

    def see_to(self, *parts: str) -> subprocess.CompletedProcess[str]:
        return self.run("./scripts/system_packages.sh", *parts)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


EVERYTHING = ("make", "venv", "engine", "dev")


def test_where_nothing_is_missing_apt_is_not_called(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL)
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


def test_debians_own_server_is_not_started_now_and_not_later(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL - {"redis-server"})
    machine.see_to("dev")
    policy = "/usr/sbin/policy-rc.d"
    assert machine.calls == [
        f"tee {policy}",
        f"chmod 755 {policy}",
        UPDATE,
        f"{INSTALL} redis-server",
        "systemctl --quiet disable redis-server",
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


def test_the_python_that_makes_the_environment_is_the_one_that_was_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ALL)
    machine.command("mine", f'case "$*" in "-m venv"*) {machine.say("mine $*")};; esac\n{PYTHON}')
    machine.run("make", "lint", "PYTHON=mine")
    assert machine.calls[:2] == ["rm -rf .venv", "mine -m venv .venv"]


def test_the_interpreter_that_runs_the_tests_would_do(tmp_path: Path) -> None:
    found = subprocess.run(
        [REPOSITORY / "scripts/find_python.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == sys.executable
