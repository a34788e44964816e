"""vLLM's plug-in: the connector is known by its name, in every process of vLLM, at no cost for other engines."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kvpact

ROOT = Path(__file__).parents[1]
SOURCE = Path(kvpact.__file__).parents[1]
FACTORY = """
class KVConnectorFactory:
    known = {}

    @classmethod
    def register_connector(cls, name, module_path, class_name):
        if name in cls.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.known[name] = (module_path, class_name)
"""
KNOWN = {"PactConnector": ("kvpact.vllm", "PactConnector")}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """As much of vLLM as a plug-in meets; the module with the list of connectors."""
    folder = tmp_path / "vllm"
    for name in ("distributed", "kv_transfer", "kv_connector"):
        folder.mkdir()
        (folder / "__init__.py").touch()
        folder /= name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "factory.py").write_text(FACTORY)
    return folder / "factory.py"


def said(vllm: Path, *lines: str) -> str:
    """What a process that runs these lines prints, and what it logs."""
    text = "\n".join(["import sys", "from kvpact.vllm.plugin import register", f"FACTORY = {MODULE!r}", *lines])
    path = os.pathsep.join([str(vllm.parents[4]), str(SOURCE)])
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"
SHOW = f"from {MODULE} import KVConnectorFactory; print(KVConnectorFactory.known)"


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    assert name == "kvpact"
    assert EntryPoint(name, value, "vllm.general_plugins").load().__module__ == "kvpact.vllm.plugin"


@pytest.mark.parametrize("times", [1, 3])
def test_a_list_that_is_imported_later_has_the_connector(vllm: Path, times: int) -> None:
    assert said(vllm, *["register()"] * times, SHOW) == str(KNOWN)


def test_a_list_that_is_there_already_has_the_connector(vllm: Path) -> None:
    assert said(vllm, f"import {MODULE}", "register()", "register()", SHOW) == str(KNOWN)


def test_looking_for_the_list_without_importing_it_changes_nothing(vllm: Path) -> None:
    look = "import importlib.util; importlib.util.find_spec(FACTORY)"
    assert said(vllm, "register()", look, "register()", SHOW) == str(KNOWN)


def test_a_list_that_is_imported_again_has_the_connector(vllm: Path) -> None:
    again = f"import importlib, {MODULE}; importlib.reload(sys.modules[FACTORY])"
    assert said(vllm, "register()", again, SHOW) == str(KNOWN)


def test_somebody_elses_connector_of_that_name_stays(vllm: Path) -> None:
    vllm.write_text(FACTORY + '\nKVConnectorFactory.register_connector("PactConnector", "theirs", "Theirs")\n')
    assert said(vllm, "register()", SHOW) == str({"PactConnector": ("theirs", "Theirs")})


def test_nothing_is_imported_for_it(vllm: Path) -> None:
    shown = "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm', 'numpy', 'msgspec'}))"
    assert said(vllm, "register()", shown) == "[]"


@pytest.mark.parametrize("text", ["", "class KVConnectorFactory:\n    pass\n"], ids=["no list", "no way to tell it"])
def test_a_vllm_that_cannot_be_told_goes_on(vllm: Path, text: str) -> None:
    vllm.write_text(text)
    words = said(vllm, "register()", f"import {MODULE}", "register()", "print('goes on')")
    assert words.startswith("goes on")
    assert 'add "kv_connector_module_path": "kvpact.vllm"' in words


def test_a_vllm_without_that_module_goes_on(vllm: Path) -> None:
    vllm.unlink()
    tried = f"try:\n    import {MODULE}\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert said(vllm, "register()", tried) == f"No module named '{MODULE}'"


CONFIG = """
class Named:
    def __init__(self, name):
        self.kv_connector = name

    def __repr__(self):
        return self.kv_connector


class VllmConfig:
    def __init__(self, name, offloads):
        self.kv_transfer_config = Named(name) if name else None
        self.offloads = offloads
        self._post_init_kv_transfer_config()

    def _post_init_kv_transfer_config(self):
        if self.offloads:
            self.kv_transfer_config = Named("OffloadingConnector")
"""
TRIED = """
from vllm.config.vllm import VllmConfig
for name, offloads in (("PactConnector", True), ("PactConnector", False), (None, True), ("Theirs", True)):
    try:
        print(VllmConfig(name, offloads).kv_transfer_config)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("before", ["", "import vllm.config.vllm"], ids=["imported later", "there already"])
def test_h103_another_setting_that_replaces_the_connector_is_refused(vllm: Path, before: str) -> None:
    folder = vllm.parents[3] / "config"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "vllm.py").write_text(CONFIG)
    first, *others = said(vllm, before, *["register()"] * 2, TRIED).splitlines()
    assert first == (
        "kvpact: --kv-transfer-config names PactConnector, and --kv-offloading-size puts OffloadingConnector in its "
        "place: leave one of them out"
    )
    assert others == ["PactConnector", "OffloadingConnector", "OffloadingConnector"]


def test_h103_a_vllm_that_decides_elsewhere_goes_on(vllm: Path) -> None:
    folder = vllm.parents[3] / "config"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "vllm.py").write_text("class VllmConfig:\n    pass\n")
    assert said(vllm, "register()", "import vllm.config.vllm", "register()", "print('goes on')") == "goes on"


OFFLOADING = {
    "v1/kv_offload/tiering/factory.py": """
class SecondaryTierFactory:
    known = {}

    @classmethod
    def register_tier(cls, name, module_path, class_name):
        if name in cls.known:
            raise ValueError(f"Tier '{name}' is already registered.")
        cls.known[name] = (module_path, class_name)
""",
    "v1/kv_offload/factory.py": """
class OffloadingSpecFactory:
    known = {}

    @classmethod
    def register_spec(cls, name, module_path, class_name):
        if name in cls.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.known[name] = (module_path, class_name)
""",
    "distributed/kv_transfer/kv_connector/v1/offloading/config.py": """
from dataclasses import dataclass

@dataclass(frozen=True)
class OffloadingConfig:
    groups: object

def build_offloading_config(vllm_config, kv_cache_config):
    return OffloadingConfig(kv_cache_config)
""",
}
"""As much of vLLM's offloading as a plug-in meets."""

OFFLOADING_MODULES = tuple(f"vllm.{file.removesuffix('.py').replace('/', '.')}" for file in OFFLOADING)
TIERS, SPECS, SETTINGS = OFFLOADING_MODULES
SHOW_OFFLOADING = f"""
import {", ".join(OFFLOADING_MODULES)}
print({TIERS}.SecondaryTierFactory.known, {SPECS}.OffloadingSpecFactory.known)
config = {SETTINGS}.build_offloading_config("engine", "groups")
print(config, config.kvpact_engine, config.kvpact_kv_cache)
"""


def with_offloading(vllm: Path, texts: dict[str, str]) -> None:
    """Put these modules beside the one with the list of connectors."""
    root = vllm.parents[3]
    for name, text in texts.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(root).parents:
            (root / folder / "__init__.py").touch()
        file.write_text(text)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("before", ["", f"import {', '.join(OFFLOADING_MODULES)}"], ids=["imported later", "there"])
def test_vllms_offloading_knows_our_tier_and_our_spec_and_keeps_the_engine(vllm: Path, before: str, times: int) -> None:
    with_offloading(vllm, OFFLOADING)
    lists, config = said(vllm, before, *["register()"] * times, SHOW_OFFLOADING).splitlines()
    tier, spec = (("kvpact.vllm.offload", name) for name in ("PactTier", "PactTieringSpec"))
    assert lists == f"{ {'PactTier': tier} } { {'PactTieringSpec': spec} }"
    assert config == "OffloadingConfig(groups='groups') engine groups"


def test_the_engine_is_kept_once_however_often_the_plugin_runs(vllm: Path) -> None:
    with_offloading(vllm, OFFLOADING)
    same = f"print({SETTINGS}.build_offloading_config is before)"
    keep = f"import {SETTINGS}; register(); before = {SETTINGS}.build_offloading_config; register()"
    assert said(vllm, "register()", keep, same) == "True"


def test_neither_tier_nor_spec_is_imported_before_vllm_asks_for_it(vllm: Path) -> None:
    with_offloading(vllm, OFFLOADING)
    shown = "print([name for name in sys.modules if name.startswith(('kvpact.vllm.offload', 'torch', 'numpy'))])"
    assert said(vllm, "register()", f"import {', '.join(OFFLOADING_MODULES)}", shown) == "[]"


def test_somebody_elses_tier_and_spec_of_that_name_stay(vllm: Path) -> None:
    theirs = {
        "v1/kv_offload/tiering/factory.py": '\nSecondaryTierFactory.register_tier("PactTier", "theirs", "Theirs")\n',
        "v1/kv_offload/factory.py": '\nOffloadingSpecFactory.register_spec("PactTieringSpec", "theirs", "Theirs")\n',
    }
    with_offloading(vllm, {name: text + theirs.get(name, "") for name, text in OFFLOADING.items()})
    assert said(vllm, "register()", SHOW_OFFLOADING).count("('theirs', 'Theirs')") == 2


@pytest.mark.parametrize(
    "texts",
    [{}, dict.fromkeys(OFFLOADING, ""), {name: text.replace("register_", "add_") for name, text in OFFLOADING.items()}],
    ids=["no modules", "no names", "no way to tell"],
)
def test_a_vllm_without_such_offloading_is_left_alone(vllm: Path, texts: dict[str, str]) -> None:
    with_offloading(vllm, texts)
    tried = f"""
import importlib
for name in {OFFLOADING_MODULES}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass
"""
    assert said(vllm, "register()", tried, "register()", SHOW) == str(KNOWN)


def test_a_configuration_that_takes_no_attribute_is_passed_on(vllm: Path) -> None:
    slots = OFFLOADING["distributed/kv_transfer/kv_connector/v1/offloading/config.py"].replace(
        "frozen=True", "frozen=True, slots=True"
    )
    with_offloading(vllm, {"distributed/kv_transfer/kv_connector/v1/offloading/config.py": slots})
    shown = f"import {SETTINGS}; print({SETTINGS}.build_offloading_config('engine', 'groups'))"
    assert said(vllm, "register()", shown) == "OffloadingConfig(groups='groups')"
