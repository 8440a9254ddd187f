"""Find free host memory: the machine's, and what a container may take of it."""

import sys

import pytest
from zerowaste_vae.engine.system import memory


def container(monkeypatch, root, own):
    monkeypatch.setattr(memory, "CGROUPS", root)
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    return memory._container_available()


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
    assert container(monkeypatch, tmp_path, tmp_path / "none") == 3_500_000
    monkeypatch.setattr(memory, "_container_available", lambda: 3_500_000)
    assert memory.available_ram() == 3_500_000


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_the_machine_counts(tmp_path, monkeypatch, limit):
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("7000000\n")
    assert container(monkeypatch, tmp_path, tmp_path / "none") is None


def limit_group(group, limit, usage, names=("memory.max", "memory.current", "inactive_file")):
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"{names[2]} 100\n")


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
@pytest.mark.parametrize("tightest", [0, 1, 2])
def test_the_tightest_of_nested_groups_counts(tmp_path, monkeypatch, tightest):
    """A service's slice may be limited where its own group is not."""
    groups = [tmp_path / "a.slice", tmp_path / "a.slice" / "b", tmp_path / "a.slice" / "b" / "c.scope"]
    for i, group in enumerate(groups):
        limit_group(group, 5000 if i == tightest else "max" if i == 1 else 90_000, 2000)
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/a.slice/b/c.scope\n")
    assert container(monkeypatch, tmp_path, own) == 3100
    own.write_text("0::/other\n")
    assert container(monkeypatch, tmp_path, own) is None


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
def test_nested_groups_of_the_first_version(tmp_path, monkeypatch):
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    limit_group(tmp_path / "memory", 1 << 62, 2000, names)
    limit_group(tmp_path / "memory" / "job", 7000, 2000, names)
    limit_group(tmp_path / "memory" / "job" / "step", 1 << 62, 1000, names)
    own = tmp_path / "own"
    own.write_text("7:cpu,cpuacct:/job\n5:memory:/job/step\n")
    assert container(monkeypatch, tmp_path, own) == 5100


@pytest.mark.skipif(sys.platform == "win32", reason="control groups are Linux's")
def test_hidden_group(tmp_path, monkeypatch):
    """A group outside of what a container sees is not looked for."""
    limit_group(tmp_path / "sees", 5000, 2000)
    limit_group(tmp_path, 100, 0)
    own = tmp_path / "own"
    own.write_text("0::/../..\n")
    assert container(monkeypatch, tmp_path / "sees", own) == 3100
