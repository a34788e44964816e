"""What installing and importing kvpact brings along: never an engine, never an accelerator library.

And what its commands say where nothing else is installed.
"""

import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvpact
import kvpact_testkit.engine
from documents import PACKAGES
from environments import Environment, new_environment
from kvpact.cli.app import KIT
from kvpact.tiers.backends import SCHEMES

HEAVY = ("torch", "vllm")
COMMANDS = ("serve", "config", "inspect", "verify", "gc", "tiers", "why", "conformance", "doctor", "demo", "compare")
NEEDS_ENGINE = ("kvpact.vllm", "kvpact.worker")
"""What copies tensors, talks to vLLM or is started with it; everything else is the core and its command."""


def imported_with(*modules: str) -> set[str]:
    """Top-level packages in a fresh interpreter that imported these modules."""
    program = (
        f"import importlib, json, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert output.returncode == 0, output.stderr
    return set(json.loads(output.stdout))


def core_modules() -> list[str]:
    """Modules of the product, and of the embedded engine, that need no engine."""
    places = {"kvpact.": kvpact.__path__, "kvpact_testkit.engine.": kvpact_testkit.engine.__path__}
    found = [module.name for prefix, path in places.items() for module in pkgutil.walk_packages(path, prefix)]
    return [name for name in found if not name.startswith(NEEDS_ENGINE)]


def test_a_plain_install_asks_for_neither_torch_nor_vllm() -> None:
    plain = [line for line in requires("kvpact") or [] if "extra ==" not in line]
    names = {Requirement(line).name.lower().replace("_", "-") for line in plain}
    assert names == {"blake3", "msgspec", "numpy", "prometheus-client", "pydantic", "rich", "typer", "xxhash"}


@pytest.mark.parametrize(
    ("modules", "brought_along"),
    [
        (core_modules(), HEAVY),
        (["kvpact.cli.app"], (*HEAVY, "numpy", "pydantic", "prometheus_client", "blake3")),
        (["kvpact"], (*HEAVY, "numpy", "pydantic", "typer", "blake3", "xxhash", "msgspec")),
    ],
    ids=["core", "command", "kvpact"],
)
def test_imports_bring_neither_an_engine_nor_more_than_they_need(
    modules: list[str], brought_along: Sequence[str]
) -> None:
    assert imported_with(*modules).isdisjoint(brought_along)


# An environment with kvpact and what it asks for, and nothing else


def plain_requirements(name: str, known: set[str]) -> set[str]:
    """The distributions that `pip install NAME` brings, by name."""
    for line in requires(name) or []:
        needed = Requirement(line)
        if needed.name.lower() not in known and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            known.add(needed.name.lower())
            plain_requirements(needed.name, known)
    return known


def link_requirements(site: Path, name: str) -> None:
    """Have this environment's distributions found there that `pip install NAME` brings, but for kvpact itself."""
    for needed in plain_requirements(name, set()) - {"kvpact"}:
        found = distribution(needed)
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.is_symlink():
                link.symlink_to(str(found.locate_file(top)))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the product alone."""
    made = new_environment(tmp_path_factory.mktemp("bare"), PACKAGES[0])
    link_requirements(made.site, "kvpact")
    return made.python


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the product and the kit, installed so that its commands are found."""
    made = new_environment(tmp_path_factory.mktemp("kit"), *PACKAGES)
    link_requirements(made.site, "kvpact-testkit")
    name = f"kvpact_testkit-{kvpact_testkit.__version__}.dist-info"
    (made.site / name).symlink_to(str(distribution("kvpact-testkit").locate_file(name)))
    return made


def bare_kvpact(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = "from kvpact.cli.app import main; main()"
    environment = {"PATH": str(python.parent), "HOME": str(python.parent)}
    return subprocess.run(
        [python, "-c", program, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment, cwd=python.parent,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --json", f"`kvpact demo` is part of the test kit; run pip install '{KIT}'"),
        ("conformance --engine vllm kvpact.vllm:PactConnector", f"pip install '{KIT}'"),
        ("serve MODEL", "vllm"),
        ("inspect redis://127.0.0.1:1", "pip install 'kvpact[redis]'"),
        ("verify s3://bucket", "pip install 'kvpact[s3]'"),
        ("gc mooncake://host:1 --namespace a", "pip install 'kvpact[mooncake]'"),
    ],
)
def test_a_command_that_needs_more_says_what_to_install_in_one_line(
    bare_python: Path, arguments: str, message: str
) -> None:
    result = bare_kvpact(bare_python, *arguments.split())
    assert result.returncode == (1 if arguments.startswith("serve") else 2)
    assert result.stdout == ""
    assert result.stderr.startswith("kvpact: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo", "the demonstration runs a real vLLM, and vllm and torch and transformers cannot be imported here"),
        ("demo --json", "install vLLM beside kvpact: pip install"),
        ("conformance --engine vllm kvpact.vllm:PactConnector", "No module named 'vllm'"),
        ("conformance kvpact_testkit.vllm.simple_connector:SimpleConnector", "No module named 'vllm'"),
    ],
)
def test_a_command_of_the_kit_says_where_an_engine_is_missing(kit: Environment, arguments: str, message: str) -> None:
    test_a_command_that_needs_more_says_what_to_install_in_one_line(kit.python, arguments, message)


SUITE = """
from kvpact_testkit.cache.conformance import CacheConformance
from kvpact_testkit.cache.subjects import reference_cache

class Good(CacheConformance):
    modes = ("native",)

    def make_cache(self, place):
        return reference_cache(place)
"""


def test_the_kit_judges_a_cache_without_vllm(kit: Environment) -> None:
    (kit.python.parent / "suites.py").write_text(SUITE)
    good = bare_kvpact(kit.python, "conformance", "suites:Good")
    assert (good.returncode, good.stderr) == (0, ""), good.stdout
    assert "0 broken" in good.stdout


def test_a_command_of_somebody_elses_that_fails_costs_itself_alone(kit: Environment) -> None:
    metadata = kit.site / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvpact.commands]\nmine = not_there:command\n")
    try:
        failed, fine = (bare_kvpact(kit.python, *words) for words in (["mine", "--x"], ["--version"]))
    finally:
        shutil.rmtree(metadata)
    assert (failed.returncode, fine.returncode) == (2, 0)
    assert failed.stderr == (
        "kvpact: `kvpact mine` cannot be loaded from not_there:command: No module named 'not_there'\n"
    )


def test_every_other_command_works_without_an_engine(bare_python: Path, tmp_path: Path) -> None:
    for arguments in (
        "--version",
        "config --memory 1GiB --tier disk:///a?capacity=1GiB",
        f"inspect {tmp_path}",
        f"verify {tmp_path} --json",
        f"tiers disk://{tmp_path}/slabs?capacity=1GiB",
        *(f"{name} --help" for name in COMMANDS),
    ):
        result = bare_kvpact(bare_python, *arguments.split())
        said = "kvpact: start vLLM with --worker-cls" if arguments.startswith("config --m") else ""
        assert (result.returncode, result.stderr[:36]) == (0, said), arguments
        assert result.stdout


def test_tiers_says_of_each_kind_that_is_not_installed_what_to_install(bare_python: Path) -> None:
    urls = [SCHEMES[scheme].example for scheme in ("redis", "s3", "mooncake")]
    result = bare_kvpact(bare_python, "tiers", *urls, "--json")
    assert (result.returncode, result.stderr) == (1, "")
    states = [row["state"] for row in json.loads(result.stdout)["now"]]
    assert all(f"kvpact[{kind}]" in state for kind, state in zip(("redis", "s3", "mooncake"), states, strict=True))
