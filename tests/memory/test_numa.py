"""Memory near a device: which node that is, and that the kernel takes the word for every mapping of a segment."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from kvpact.memory import numa
from kvpact.memory.arena import ArenaSegment


@pytest.mark.parametrize(
    ("online", "said", "node"),
    [("0-1", "1", 1), ("0-1", "0", 0), ("0,2", "2", 2), ("0-1", "-1", None), ("0", "0", None), ("0-1", None, None)],
)
def test_the_node_of_a_device_is_what_the_machine_says(
    online: str, said: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"devices/system/node/online": online, "bus/pci/devices/0000:65:00.0/numa_node": said}
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(numa, "SYS", tmp_path)
    assert numa.near_node("0000:65:00.0") == node
    assert numa.near_node("0000:66:00.0") is None


def test_a_machine_without_nodes_has_none_that_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "SYS", tmp_path)
    assert numa.near_node("0000:65:00.0") is None


def preferred(address: int) -> int | None:
    """The node that pages at this address come from: the first of the mask that get_mempolicy fills in; else None."""
    mode = ctypes.c_int()
    mask = ctypes.c_ulong()
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    of_address = 2
    longs = (ctypes.c_ulong(8 * ctypes.sizeof(mask) * 16 + 1), ctypes.c_ulong(address), ctypes.c_ulong(of_address))
    masks = (ctypes.c_ulong * 16)(mask)
    assert not ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.byref(mode), masks, *longs)
    return masks[0].bit_length() - 1 if mode.value == numa.MPOL_PREFERRED and masks[0] else None


def test_a_segments_pages_come_from_the_node_in_every_process_that_maps_it() -> None:
    segment = ArenaSegment.create(6, 1 << 20)
    try:
        numa.prefer(0, segment.mapped_at, len(segment.memory))
    except OSError as error:
        segment.close()
        pytest.skip(f"this kernel does not let us say where memory is to lie: {error}")
    segment.place_pages(huge=True, node=0)
    segment.pages.take_all()
    other = ArenaSegment.attach(segment.address())
    for each in (segment, other):
        assert preferred(each.mapped_at) == 0
        assert preferred(each.mapped_at + len(each.memory) - 4096) == 0
    assert preferred(id(segment)) is None, "other memory lies where it likes"
    other.close()
    segment.close()


def test_a_node_that_is_not_there_is_an_error() -> None:
    segment = ArenaSegment.create(1, 4096)
    with pytest.raises(OSError, match="Errno"):
        numa.prefer(1000, segment.mapped_at, 4096)
    segment.close()
