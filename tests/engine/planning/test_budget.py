"""Where the memory target comes from."""

import sys

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.planning import budget as memory

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_cpu_target(monkeypatch):
    monkeypatch.setattr(memory, "available_ram", lambda: 8 * GIB)
    assert memory.memory_target(CPU, None, None, GIB) == 5 * GIB
    assert memory.memory_target(CPU, 0, 0, GIB) == 5 * GIB
    assert memory.memory_target(CPU, None, 3, 0) == 3 * GIB
    assert memory.memory_target(CPU, 2, 3, 0) == 2 * GIB
    monkeypatch.setattr(memory, "available_ram", lambda: None)
    assert memory.memory_target(CPU, None, None, 0) is None


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "asked", "expected"),
    [
        (16, 0, 0, None, 13.0),  # an empty 16 GB card
        (16, 0, 0, 8, 8.0),
        (10, 0, 0, None, 9.5),  # another process holds 6 GB, and a margin stays free
        (12, 4, 3, None, 11.0),  # 3 GB are ours, 1 GB of it this VAE's weights
        (16, 0, 0, 40, 15.5),  # no more than the card less the margin
        (1, 14, 14, 2, 0.0),  # nothing left: never less than nothing
    ],
)
def test_cuda_target(monkeypatch, free, reserved, allocated, asked, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: allocated * GIB)
    held = min(allocated, 1) * GIB
    assert memory.memory_target(GPU, asked, None, held) == expected * GIB
    room = memory.memory_room(GPU, asked, held)
    if asked:
        assert room is None  # the user's word is not raised
    else:
        assert room == {16: 15.5, 10: 9.5, 12: 13.5}[free] * GIB


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_sizes_that_are_none(bad):
    with pytest.raises(InputError, match="vram_gb="):
        memory.memory_target(CPU, bad, None, 0)
    with pytest.raises(InputError, match="ram_gb="):
        memory.memory_target(CPU, None, bad, 0)


def test_available_ram_is_plausible():
    assert memory.available_ram() > 64 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache"),
    [("", "memory.max", "memory.current", "inactive_file"),
     ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")],
)  # fmt: skip
def test_a_containers_limit_counts(tmp_path, monkeypatch, folder, limit, usage, cache):
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("9000000\n")
    (group / usage).write_text("7000000\n")
    (group / "memory.stat").write_text(f"anon 5000000\n{cache} 1500000\n")
    assert memory._container_available(tmp_path, tmp_path / "none") == 3_500_000
    monkeypatch.setattr(memory, "_container_available", lambda: 3_500_000)
    assert memory.available_ram() == 3_500_000


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_the_machine_counts(tmp_path, limit):
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("7000000\n")
    assert memory._container_available(tmp_path, tmp_path / "none") is None


def limit_group(group, limit, usage, names=("memory.max", "memory.current", "inactive_file")):
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"{names[2]} 100\n")


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_the_tightest_of_nested_groups_counts(tmp_path, tightest):
    """A service's slice may be limited where its own group is not."""
    groups = [tmp_path / "a.slice", tmp_path / "a.slice" / "b", tmp_path / "a.slice" / "b" / "c.scope"]
    for i, group in enumerate(groups):
        limit_group(group, 5000 if i == tightest else "max" if i == 1 else 90_000, 2000)
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/a.slice/b/c.scope\n")
    assert memory._container_available(tmp_path, own) == 3100
    own.write_text("0::/other\n")
    assert memory._container_available(tmp_path, own) is None


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
def test_nested_groups_of_the_first_version(tmp_path):
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    limit_group(tmp_path / "memory", 1 << 62, 2000, names)
    limit_group(tmp_path / "memory" / "job", 7000, 2000, names)
    limit_group(tmp_path / "memory" / "job" / "step", 1 << 62, 1000, names)
    own = tmp_path / "own"
    own.write_text("7:cpu,cpuacct:/job\n5:memory:/job/step\n")
    assert memory._container_available(tmp_path, own) == 5100


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
def test_a_group_outside_of_what_a_container_sees_is_not_looked_for(tmp_path):
    limit_group(tmp_path / "sees", 5000, 2000)
    limit_group(tmp_path, 100, 0)
    own = tmp_path / "own"
    own.write_text("0::/../..\n")
    assert memory._container_available(tmp_path / "sees", own) == 3100
