"""What figures mean, on figures that are made up: goals, what to set, and when kvpact must not serve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpact.cli.app import app
from kvpact.errors import ConfigError
from kvpact.torch_cuda.doctor import command
from kvpact.torch_cuda.doctor.facts import machine_facts, nvidia_release
from kvpact.torch_cuda.doctor.report import lines
from kvpact.torch_cuda.doctor.shapes import Shape, model_shapes, shapes_of, usual_shapes
from kvpact.torch_cuda.doctor.verdicts import goals, is_sound, verdicts

KIB, MIB = 1 << 10, 1 << 20


def row(way: str, layout: str, page: int, entry: int, rate: float, path: str = "copy engines", chosen: bool = True):
    return {
        "way": way, "what": "background", "path": path, "chosen": chosen, "layout": layout, "page_bytes": page,
        "entry_bytes": entry, "entries": 512, "gb_per_s": rate, "spread": 0.01, "call_us_per_entry": 0.6,
    }  # fmt: skip


GOOD: dict[str, dict[str, Any]] = {
    "machine": {
        "gpu": "H200", "nvidia_driver": "580.65.06", "cuda_of_driver": 13000, "torch": "2.13", "cuda_of_torch": "13.0",
        "link_generation_now": 1, "link_generation_most": 5, "link_lanes_now": 16, "link_lanes_most": 16,
        "device_numa_node": 1, "process_numa_nodes": [0, 1], "memlock_limit_bytes": 8 * MIB, "copies_in_batches": True,
        "kernels_read_host_memory": True,
    },
    "pinning": {"by_chunk": [{"chunk_bytes": 256 * MIB, "seconds_per_gib": 0.1, "worst_launch_ms": 1.0,
                              "pages_taken_before": True, "pinned_chunks": 4, "error": None}]},
    "bus": {"in_gb_per_s": 55.0, "out_gb_per_s": 54.0, "both_at_once_gb_per_s": 90.0, "link_generation_in_use": 5,
            "link_lanes_in_use": 16},
    "bandwidth": {"rows": [
        row("load", "LBNHC", 8 * KIB, 8 * KIB, 6.0, chosen=False),
        row("load", "LBNHC", 8 * KIB, 8 * KIB, 50.0, "kernel"),
        row("load", "BLNHC", 8 * KIB, 256 * KIB, 54.0),
        row("load", "LBNHC", 64 * KIB, 64 * KIB, 52.0),
        row("save", "LBNHC", 64 * KIB, 64 * KIB, 50.0),
    ]},
    "order": {"turns": 20, "wrong_out_in_stream_order": 0, "wrong_in_in_stream_order": 0, "wrong_in_at_any_time": 0,
              "wrong_out_at_any_time": 9},
    "start": {"arena_bytes": 8 << 30, "start_seconds": 0.8, "usable_bytes_at_start": 4 << 30, "bit_exact": True,
              "round_trip_seconds": 0.05},
    "computing_thread": {"rows": [
        {"step": "no loads", "blocks": 0, "begin_us": 1.0, "hooks_us": 9.0, "cpu_us": 9.0},
        {"step": "submitted at once", "blocks": 16, "begin_us": 200.0, "hooks_us": 20.0, "cpu_us": 210.0},
    ]},
    "beside": {"rows": []},
    "spans": {"end": "ok", "error": None, "rows": [{"copy": "inside", "error_code": 0},
                                                   {"copy": "across_two", "error_code": 1}]},
    "captures": {"end": "ok", "error": None, "rows": [
        {"attached_as_kvpact": True, "captures": 20, "good_captures": 20, "capture_error": None},
        {"attached_as_kvpact": False, "captures": 20, "good_captures": 0, "capture_error": "900"},
    ]},
}  # fmt: skip


def with_change(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    figures = copy.deepcopy(GOOD)
    change(figures)
    return figures


def test_a_good_machine_meets_its_goals_and_has_nothing_to_set() -> None:
    assert verdicts(GOOD) == []
    met = {goal.name: goal.met for goal in goals(GOOD)}
    assert met.pop("decode beside copies, slower by, worst") is None
    assert set(met.values()) == {True}
    document = {"sections": GOOD, "verdicts": [], "sound": True}
    text = "\n".join(lines(document))
    assert "load of entries of 64 KiB and more / bus, worst: 0.945, at least 0.9: yes" in text
    assert "slower by, worst: -, at most 0.02: not measured" in text
    assert "nothing to set" in text
    assert "6.0 GB/s (10.9% of the bus, spread 1%), 0.60 us an entry" in text


def set_rates(figures: dict[str, Any], *rows: dict[str, Any]) -> None:
    figures["bandwidth"]["rows"] = list(rows)


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        (
            lambda f: set_rates(
                f,
                row("load", "LBNHC", 64 * KIB, 64 * KIB, 7.0),
                row("load", "BLNHC", 64 * KIB, 2 * MIB, 55.0),
            ),
            "advice",
            'for pages of 64KiB, "kv_layout": "blocks" would make entries of 2MiB: 55 instead of 7 GB/s for loads',
        ),
        (
            lambda f: set_rates(
                f,
                row("save", "LBNHC", 8 * KIB, 8 * KIB, 6.0),
                row("save", "BLNHC", 8 * KIB, 256 * KIB, 50.0),
            ),
            "advice",
            "would make entries of 256KiB: 50 instead of 6 GB/s for saves",
        ),
        (
            lambda f: f["machine"].update(process_numa_nodes=[0]),
            "advice",
            "NUMA node 1, this process runs on node 0: start the engine with `numactl --cpunodebind=1 --preferred=1`",
        ),
        (lambda f: f["bus"].update(link_generation_in_use=4), "advice", "has generation 4, and could have 5"),
        (lambda f: f["bus"].update(link_lanes_in_use=8), "advice", "has lanes 8, and could have 16"),
        (
            lambda f: f["pinning"]["by_chunk"][0].update(error="CUDA error 2", seconds_per_gib=None),
            "advice",
            "cannot be pinned (CUDA error 2): raise the limit on locked memory, which is 8MiB (ulimit -l unlimited",
        ),
        (lambda f: f["pinning"]["by_chunk"][0].update(worst_launch_ms=9.0), "note", "a launch of a kernel took 9.0 ms"),
        (lambda f: f["machine"].update(copies_in_batches=False), "advice", "copies entries one by one"),
        (lambda f: f["machine"].update(kernels_read_host_memory=False), "note", "small pages go by the copy engines"),
        (
            lambda f: set_rates(
                f,
                row("load", "LBNHC", 8 * KIB, 8 * KIB, 6.0),
                row("load", "LBNHC", 8 * KIB, 8 * KIB, 50.0, "kernel", chosen=False),
            ),
            "note",
            "LBNHC, pages of 8KiB, background: the kernel would load 50 GB/s, the copy engines loads 6",
        ),
        (lambda f: f["order"].update(wrong_out_in_stream_order=2), "unsound", "saves read blocks before"),
        (lambda f: f["order"].update(wrong_in_at_any_time=1), "unsound", "1 times of 20"),
        (lambda f: f.update(start={"error": "ConfigError: 3 of 64 blocks came back"}), "unsound", "cannot be used"),
        (lambda f: f.update(order={"error": "OutOfMemoryError: none"}), "unsound", "not be tried (order): OutOfMemory"),
        (
            lambda f: f["captures"]["rows"][0].update(good_captures=19, capture_error="error 900"),
            "unsound",
            "19 of 20 were captured (error 900)",
        ),
        (lambda f: f["captures"].update(end="hung", rows=[]), "unsound", "the trial never ended"),
        (lambda f: f["spans"]["rows"][0].update(error_code=1), "unsound", "a copy of pinned memory (inside) fails"),
        (lambda f: f.update(bus={"error": "CudaError: 2"}), "advice", "bus could not be measured: CudaError: 2"),
        (
            lambda f: f.update(long_batches={"end": "exit status 1", "rows": [], "error": "no memory"}),
            "advice",
            "long_batches could not be measured: no memory",
        ),
    ],
)
def test_what_is_wrong_is_said_and_what_to_set(
    change: Callable[[dict[str, Any]], object], level: str, said: str
) -> None:
    found = verdicts(with_change(change))
    assert [(one.level, said in one.text) for one in found] == [(level, True)], found
    assert is_sound(found) is (level != "unsound")


@pytest.mark.parametrize(
    ("change", "goal"),
    [
        (lambda f: f["bandwidth"]["rows"][3].update(gb_per_s=49.0), "load of entries of 64 KiB and more"),
        (lambda f: f["bandwidth"]["rows"][1].update(gb_per_s=43.0), "load of smaller entries"),
        (lambda f: f["bandwidth"]["rows"][4].update(gb_per_s=45.0), "save of entries of 64 KiB"),
        (lambda f: f["beside"]["rows"].append({"slower": 0.021}), "decode beside copies"),
        (lambda f: f["computing_thread"]["rows"][1].update(begin_us=290.0), "hooks with loads"),
        (lambda f: f["computing_thread"]["rows"][0].update(hooks_us=31.0), "hooks without loads"),
        (lambda f: f["start"].update(start_seconds=1.1), "add to a start"),
    ],
)
def test_a_goal_that_is_missed_is_named(change: Callable[[dict[str, Any]], object], goal: str) -> None:
    missed = [one for one in goals(with_change(change)) if one.met is False]
    assert [goal in one.name for one in missed] == [True]
    assert missed[0].line().endswith(": NO")
    assert missed[0].document()["met"] is False


# The machine


def test_the_machine_is_read_from_its_files(tmp_path: Path) -> None:
    files = {
        "sys/bus/pci/devices/0000:65:00.0/current_link_speed": "2.5 GT/s PCIe",
        "sys/bus/pci/devices/0000:65:00.0/current_link_width": "16",
        "sys/bus/pci/devices/0000:65:00.0/max_link_speed": "32.0 GT/s PCIe",
        "sys/bus/pci/devices/0000:65:00.0/max_link_width": "16",
        "sys/bus/pci/devices/0000:65:00.0/numa_node": "1",
        "sys/devices/system/node/node0/cpulist": "0-1023",
        "sys/devices/system/node/node1/cpulist": "2000-2047,2100",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A Processor\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = machine_facts("0000:65:00.0", tmp_path)
    assert (found["link_generation_now"], found["link_generation_most"], found["link_lanes_most"]) == (1, 5, 16)
    assert (found["device_numa_node"], found["process_numa_nodes"]) == (1, [0])
    assert (found["nvidia_driver"], found["cpu"]) == ("580.65.06", "A Processor")
    assert "memlock_limit_bytes" in found
    nothing = machine_facts("0000:65:00.0", tmp_path / "elsewhere")
    assert (nothing["link_generation_now"], nothing["device_numa_node"], nothing["process_numa_nodes"]) == (
        None,
        None,
        [],
    )
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Sat\n"
    )
    assert nvidia_release(tmp_path) == "535.104"


# Shapes and options


LLAMA = '{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, %s}'


@pytest.mark.parametrize(
    ("config", "ranks", "page_bytes", "layers"),
    [
        (LLAMA % '"torch_dtype": "bfloat16"', 1, 64 * KIB, 32),
        (LLAMA % '"dtype": "float32"', 8, 16 * KIB, 32),
        ('{"text_config": %s}' % (LLAMA % '"head_dim": 64'), 16, 4 * KIB, 32),
        ('{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}', 8, 18 * KIB, 61),
    ],
)  # fmt: skip
def test_a_models_pages_are_those_of_its_configuration(
    tmp_path: Path, config: str, ranks: int, page_bytes: int, layers: int
) -> None:
    (tmp_path / "config.json").write_text(config)
    expected = (Shape("LBNHC", page_bytes, layers), Shape("BLNHC", page_bytes, layers))
    assert model_shapes(tmp_path, 16, ranks) == model_shapes(tmp_path / "config.json", 16, ranks) == expected


@pytest.mark.parametrize("config", ["{}", "[]", "no json", '{"num_hidden_layers": 2, "num_attention_heads": 0}'])
def test_a_configuration_that_does_not_say_enough_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_shapes(tmp_path, 16, 1)


def test_the_usual_shapes_are_the_pages_of_the_goals() -> None:
    assert {shape.page_bytes for shape in usual_shapes()} == {8 * KIB, 64 * KIB, 512 * KIB, 2 * MIB}
    with pytest.raises(ConfigError, match="multiple of 8 bytes, not 12"):
        shapes_of([12], 32)


TORCH = {
    "no torch here": None,
    "torch is built for CPUs here": "hip: Optional[str] = None\ncuda: Optional[str] = None\n",
    "torch is built for ROCm here": "cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43484'\n",
    "no NVIDIA driver here": "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
}


@pytest.mark.parametrize("said", TORCH)
def test_without_a_gpu_it_is_said_why_in_one_line_and_torch_is_not_imported(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = TORCH[said]
    (tmp_path / "version.py").write_text(version or "")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if version is None else spec)
    monkeypatch.setattr(command, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    assert command.main(["--gpu"]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert output.err.startswith(f"kvpact: {said}")


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "require_device", lambda device: None)
    assert command.main(["--json", str(tmp_path / "missing" / "doctor.json")]) == 2
    assert "doctor.json cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_part_of_the_sections_does_not_say_that_the_copies_may_be_used() -> None:
    document = {"sections": {"bus": GOOD["bus"]}, "verdicts": [], "sound": True}
    assert list(lines(document))[-1].endswith("was not tried: that takes the sections order and start")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "all"], "there is no section 'all'; there are machine, pinning"),
        (["--kv-page-bytes", "8k"], '--kv-page-bytes: write "8KiB"'),
        (["--model", "/nowhere"], "/nowhere cannot be read"),
        (["--tp", "0"], "--tp 0 and --block-size 16: both must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


OPTIONS = [
    "--gpu",
    "--json",
    "out.json",
    "--device",
    "1",
    "--quick",
    "--kv-page-bytes",
    "8KiB",
    "--kv-page-bytes",
    "64KiB",
    "--model",
    "m",
    "--tp",
    "8",
    "--block-size",
    "32",
    "--only",
    "bus",
    "--only",
    "order",
]
MEANT = command.Wishes(1, True, Path("out.json"), ("8KiB", "64KiB"), Path("m"), 8, 32, ("bus", "order"))


@pytest.mark.parametrize(("sound", "status"), [(True, 0), (False, 1)])
def test_both_commands_have_the_same_options_and_exit_status(
    monkeypatch: pytest.MonkeyPatch, sound: bool, status: int
) -> None:
    asked: list[command.Wishes] = []

    def examined(wishes: command.Wishes, say: object, tell: object) -> bool:
        asked.append(wishes)
        return sound

    monkeypatch.setattr(command, "examine", examined)
    monkeypatch.setattr("kvpact.cli.doctor.examine", examined)
    assert command.main(OPTIONS) == status
    assert CliRunner().invoke(app, ["doctor", *OPTIONS]).exit_code == status
    assert command.main([]) == status
    assert CliRunner().invoke(app, ["doctor", "--gpu"]).exit_code == status
    assert asked == [MEANT, MEANT, command.Wishes(), command.Wishes()]
