"""What installing and importing kvpact brings along: never an engine, never an accelerator library."""

import json
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import requires

import kvpact

HEAVY = ("torch", "vllm")
NEEDS_ENGINE = ("kvpact.vllm", "kvpact.transfer", "kvpact.demo", "kvpact.testkit")
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
    found = (module.name for module in pkgutil.walk_packages(kvpact.__path__, "kvpact."))
    return [name for name in found if not name.startswith(NEEDS_ENGINE)]


def test_a_plain_install_asks_for_neither_torch_nor_vllm():
    plain = [line for line in requires("kvpact") or [] if "extra ==" not in line]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in plain}
    assert names == {"blake3", "msgspec", "numpy", "prometheus-client", "pydantic", "rich", "typer", "xxhash"}


def test_the_core_imports_neither_torch_nor_vllm():
    assert {"kvpact.blocks", "kvpact.config", "kvpact.cli.app", "kvpact.tiers.base"} <= set(core_modules())
    assert imported_with(*core_modules()).isdisjoint(HEAVY)


def test_the_command_starts_without_the_weight_of_its_subcommands():
    assert imported_with("kvpact.cli.app").isdisjoint({*HEAVY, "numpy", "pydantic", "prometheus_client", "blake3"})


def test_kvpact_itself_imports_nothing():
    assert imported_with("kvpact").isdisjoint({*HEAVY, "numpy", "pydantic", "typer", "blake3", "xxhash", "msgspec"})
