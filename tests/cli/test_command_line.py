"""What all commands of `kvpact` have in common: options, help, tables on a terminal, and where they run."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpact.cli.app import app
from kvpact.cli.vllm_options import refuse_misspelt
from kvpact.errors import ConfigError
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import chained
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.urls import parse_tier_url
from kvpact_command import kvpact, refusal, without_settings
from kvpact_testkit.sample_blocks import document, filled_buffers

LLAMA = Namespace({"weights": "hub:0a1b2c3d"}, "meta-llama/Llama-3.1-8B-Instruct")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


def on_a_terminal(*arguments: object, columns: int, **environment: str) -> list[str]:
    """The lines that a command prints on a terminal of this width."""
    main, side = pty.openpty()
    ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "CI", "TERM")}
    command = [sys.executable, "-m", "kvpact", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=side, stdin=side, env=kept | {"TERM": "xterm"} | environment)
    os.close(side)
    with os.fdopen(main, "rb", buffering=0) as screen:
        text = b"".join(_until_end(screen.fileno())).decode()
    process.wait(60)
    return text.splitlines()


def _until_end(descriptor: int) -> Iterator[bytes]:
    try:
        while piece := os.read(descriptor, 65536):
            yield piece
    except OSError:  # the terminal's last user has ended
        return


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


@pytest.fixture
def slabs(tmp_path: Path) -> Path:
    """A disk tier's directory with blocks of a model, and a file that is no slab."""
    tier = open_tier(parse_tier_url(f"disk://{tmp_path}/slabs?capacity=16MiB"), TierContext(LLAMA, 8192))
    wanted = document("seen", 6)
    assert all(tier.put(chained(wanted.keys, filled_buffers(wanted.keys, 8192, 2))))
    tier.close()
    (tmp_path / "slabs" / "kvpact" / f"{'0' * 16}.slab").write_bytes(b"no slab" * 1000)
    return tmp_path / "slabs"


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(slabs: Path, columns: int) -> None:
    url = f"disk://{slabs}/{'a-long-name-of-a-directory/' * 3}?capacity=200GiB"
    for arguments in (("inspect", slabs), ("verify", slabs), ("tiers", url, f"disk://{slabs}?capacity=1GiB")):
        shown = [plain(line) for line in on_a_terminal(*arguments, columns=columns)]
        header = next(at for at, line in enumerate(shown) if line.startswith(("slab", "tier")))
        table = [line for line in shown[header:] if not line.startswith(("/", "disk tier"))]  # without messages
        assert len(table) > 1
        assert all(len(line.rstrip()) <= columns for line in table), table
        assert "…" not in "".join(shown)


def test_a_pipe_gets_a_line_for_each_row_however_narrow_the_terminal(
    slabs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (row,) = [line for line in kvpact("inspect", slabs).stdout.splitlines() if LLAMA.name in line]
    assert LLAMA.model in row
    assert row.endswith(" s")


def test_inspect_names_the_model_of_a_slab(slabs: Path) -> None:
    fields = {
        Path(slab["path"]).stem: slab["fields"]
        for slab in json.loads(kvpact("inspect", slabs, "--json").stdout)["slabs"]
    }
    assert fields[LLAMA.name] == {"model": LLAMA.model, "weights": "hub:0a1b2c3d"}


def test_a_models_name_goes_with_its_last_slab(slabs: Path) -> None:
    assert (slabs / "kvpact" / f"{LLAMA.name}.model").read_text() == LLAMA.model
    assert kvpact("gc", slabs, "--yes", "--namespace", LLAMA.name).exit_code == 0
    other = Namespace({"weights": "other"}, "other")
    open_tier(parse_tier_url(f"disk://{slabs}?capacity=16MiB"), TierContext(other, 8192)).close()
    assert [path.stem for path in (slabs / "kvpact").glob("*.model")] == [other.name]


def test_what_is_bad_is_red_on_a_terminal_that_wants_colours(slabs: Path) -> None:
    for environment, red in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = "\n".join(on_a_terminal("inspect", slabs, columns=120, **environment))
        assert "unreadable" in shown
        assert ("31m" in shown) is red
    assert "\x1b" not in kvpact("inspect", slabs).stdout


def test_help_shows_whole_summaries_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = kvpact("--help").stdout
    assert "..." not in shown.partition("Commands:")[2]
    assert "Without any, show those of this user's running engines." in " ".join(shown.split())


def commands() -> list[str]:
    shown = CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:")[2]
    return re.findall(r"(?m)^  (\w+)  ", shown)


@pytest.mark.parametrize("command", ["", *commands()])
def test_h_is_help(command: str) -> None:
    short, long = (kvpact(*command.split(), option) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)


@pytest.mark.parametrize("command", commands())
def test_json_is_a_switch_and_config_a_toml_file(command: str) -> None:
    shown = kvpact(command, "--help").stdout
    for option, meaning in (("json", "One JSON document"), ("config", "FILE TOML file"), ("output", "FILE File")):
        for found in re.findall(rf"--{option} (.*)", " ".join(shown.split())):
            assert found.startswith(meaning), found


def test_shells_complete_commands() -> None:
    environment = {"_KVPACT_COMPLETE": "complete_bash", "COMP_WORDS": "kvpact ver", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from kvpact.cli.app import main; main()"]
    said = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60).stdout
    assert said.split() == ["verify"]


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("--teir", "--tier"), ("--memmory=4GiB", "--memory"), ("--mem", "--memory"), ("--trough", "--through")],
)
def test_serve_refuses_a_misspelt_option_of_its_own(argument: str, meant: str) -> None:
    name = argument.partition("=")[0]
    said = refusal("serve", "model", argument, "4GiB")
    assert f"neither kvpact serve nor vllm serve has an option {name}; did you mean {meant}?" in said


def test_serve_knows_the_options_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('takes seconds')")
    source.write_text('class EngineArgs:\n    max_model_len: int = 1\n\ngroup.add_argument("--enable-lora")\n')
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    known = (
        "--max-model-len=3",
        "--max_model_len",
        "3",
        "--no-enable-lora",
        "--enable-lora.x",
        "--max-m",
        "-tp",
        "--xyz",
    )
    refuse_misspelt(known)
    for word, meant in (
        ("--max-modl-len", "--max-model-len"),
        ("--enable_lora_", "--enable-lora"),
        ("--no-enable-lor", ""),
    ):
        if not meant:
            refuse_misspelt([word])  # shortened
            continue
        with pytest.raises(ConfigError, match=f"has an option {word}; did you mean {meant}"):
            refuse_misspelt([word])


def test_what_stands_behind_two_dashes_is_not_checked() -> None:
    assert "--kv-transfer-config" in refusal("serve", "m", "--", "--teir", "--kv-transfer-config", "x")


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_elsewhere_than_on_linux_one_line_says_so(platform: str) -> None:
    program = f"""
import sys
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "resource"])
import typer
sys.platform = {platform!r}
from kvpact.cli.app import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"kvpact: kvpact runs on Linux only, not on {platform}\n"
