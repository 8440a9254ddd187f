"""GPU tests in several processes: every test is run once, what failed is found, and a second run goes on."""

import subprocess

import pytest


@pytest.fixture(scope="module")
def tool(load_tool):
    return load_tool("run_gpu_tests")


def test_batches_hold_every_test_once(tool):
    names = [f"tests/test_{file}.py::test_{i}" for file, count in enumerate((3, 40, 20, 9, 1)) for i in range(count)]
    made = list(tool.batches(names))
    assert sorted(name for batch in made for name in batch) == sorted(names) and list(tool.batches([])) == []
    assert [len(batch) for batch in made] == [15, 15, 15, 10, 14, 4]
    small = [{name.partition("::")[0] for name in batch} for batch in made[-2:]]
    assert small == [{"tests/test_2.py", "tests/test_3.py"}, {"tests/test_0.py", "tests/test_4.py"}]


def test_failures_are_found(tool):
    text = "\n".join([
        "F.E", "FAILED tests/test_a.py::test_one[fp16-3x4] - AssertionError: assert 1 == 2",
        "ERROR tests/test_a.py::test_two - RuntimeError", "FAILED tests/test_b.py::test_three",
        "FAILED tests/test_b.py::test_three", "1 passed",
    ])  # fmt: skip
    found = tool.failures(text)
    assert found == ["tests/test_a.py::test_one[fp16-3x4]", "tests/test_a.py::test_two", "tests/test_b.py::test_three"]


def test_a_second_run_goes_on(tool, tmp_path, monkeypatch, capsys):
    """Of three tests one passes, one fails beside others only, one always."""
    names, tries = [f"tests/test_a.py::test_{name}" for name in ("good", "crowded", "bad")], []

    def run(command, timeout=None, **_):
        if "--collect-only" in command:
            return subprocess.CompletedProcess(command, 0, "\n".join([*names, "3 tests collected"]), "")
        (option,) = (part for part in command if part.startswith("--passed="))
        asked = [name for name in names if name in command]
        tries.append(asked)
        failed = [n for n in asked if n.endswith("bad") or (n.endswith("crowded") and len(asked) > 1)]
        with open(option.partition("=")[2], "w") as file:
            file.writelines(f"{name}\n" for name in asked if name not in failed)
        return subprocess.CompletedProcess(command, 1, "".join(f"FAILED {name} - Error\n" for name in failed), "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool, "gpus", lambda: ["0"])
    done = tmp_path / "done.txt"
    assert tool.main(["--done", str(done), "--each", "1"]) == 1
    assert done.read_text().splitlines() == sorted(names[:2]) and tries == [names, names[1:2], names[2:]]
    assert "2 passed, 2 failed beside others, of these 1 alone" in capsys.readouterr().out
    tries.clear()
    names[2] = "tests/test_a.py::test_mended"
    assert tool.main(["--done", str(done)]) == 0 and tries == [names[2:]]
    assert tool.main(["--done", str(tmp_path / "other"), "--limit", "1"]) == 2


def test_a_process_that_dies_has_not_passed(tool, tmp_path, monkeypatch, capsys):
    """And tests that cannot be collected end the run."""
    names = [f"tests/test_a.py::test_{n}" for n in range(2)]

    def run(command, timeout=None, **_):
        if "--collect-only" in command:
            return subprocess.CompletedProcess(command, status, "\n".join([*names, "2 tests collected"]), "")
        return subprocess.CompletedProcess(command, -6, "free(): invalid pointer", "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool, "gpus", lambda: ["0"])
    status = 0
    assert tool.main(["--done", str(tmp_path / "done"), "--each", "1"]) == 1
    assert "0 passed, 2 failed beside others, of these 2 alone" in capsys.readouterr().out
    status = 2
    with pytest.raises(SystemExit, match="cannot be collected"):
        tool.main(["--done", str(tmp_path / "done")])
