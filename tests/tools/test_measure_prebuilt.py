"""Questions of the tool to its processes, and what it makes of their answers; they need a GPU."""

import json

import pytest


@pytest.fixture
def tool(load_tool):
    return load_tool("measure_prebuilt")


def answers(tool, monkeypatch, digests, other=""):
    """Processes that answer with the digest of (family, half, whether Triton ran it)."""
    asked = []

    def child(ask, **environment):
        asked.append((ask, environment))
        ran = "Triton's kernels" if ask["triton"] else f"prebuilt kernels, set {ask['form']}{other}"
        return {"seconds": [9.0, 2.0, 2.0], "steady": 2.0, "ms_frame": 95.0, "digest": digests(ask), "us_launch": 12.5,
                "ran": ran if ask["half"] == "decode" or ask["family"] != "ltx" else "no encoder"}  # fmt: skip

    monkeypatch.setattr(tool, "child", child)
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: True)
    return asked


def test_other_bits_are_found(tool, monkeypatch, capsys):
    other = ("flux", "encode", True)
    answers(tool, monkeypatch, lambda ask: str((ask["family"], ask["half"], ask["triton"]) == other))
    assert tool.main(["--forms", "A", "--families", "wan2.1", "--quick"]) == 0
    assert tool.main(["--forms", "A", "--families", "wan2.1,flux", "--quick"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["equal"] for line in lines] == [True, True, True, True, True, False]


@pytest.mark.parametrize(("other", "equal"), [("", True), (" (set C lacks it)", False)])
def test_frames_of_another_way_are_unequal(tool, monkeypatch, capsys, other, equal):
    """Frames that another way ran, or that are missing, are not equal."""
    answers(tool, monkeypatch, lambda ask: "", other)
    assert tool.main(["--forms", "C", "--families", "ltx", "--quick"]) == (not equal)
    assert [json.loads(line)["equal"] for line in capsys.readouterr().out.splitlines()] == [equal, None]


def test_first_decodes_share_a_new_cache_of_the_drivers(tool, monkeypatch, capsys):
    asked = answers(tool, monkeypatch, lambda ask: "same")
    assert tool.main(["--forms", "C", "--families", "ltx"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert found["seconds beyond a steady decode"] == {"installation": 7.0, "process": 7.0} and found["equal"]
    assert [ask["triton"] for ask, _ in asked[:3]] == [False] * 3
    caches = [environment.get("CUDA_CACHE_PATH") for _, environment in asked[:3]]
    assert len(set(caches)) == 1 and caches[0]
    assert not any("CUDA_CACHE_PATH" in environment for ask, environment in asked if ask["triton"])


@pytest.mark.parametrize("differs", [False, True])
def test_times_alone(tool, monkeypatch, capsys, differs):
    """Times alone are one line a form, and the frames that are timed are compared."""
    asked = answers(tool, monkeypatch, lambda ask: str(differs and ask["triton"]))
    assert tool.main(["--forms", "A,C", "--times"]) == differs
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["form"], one["equal"]) for one in found] == [("A", not differs), ("C", not differs)]
    assert {ask["family"] for ask, _ in asked} == {"seedvr2"}


@pytest.mark.parametrize("arguments", [["--quick", "--times"], ["--forms", "D"], ["--families", "nobody"]])
def test_other_names_are_refused(tool, capsys, arguments):
    with pytest.raises(SystemExit):
        tool.main(arguments)
    said = capsys.readouterr().err
    assert "is none of" in said or "not allowed with argument --quick" in said
