"""The record of digests: every case of a run is in it, and no difference between two goes unsaid."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def tool(load_tool):
    return load_tool("frame_digests")


def test_shapes(tool):
    """Those of every family, and of some their published numbers of parameters."""
    count = {family: sum(map(math.prod, tool.shapes(family).values())) for family in tool.architectures()}
    known = {"seedvr2": 250_648_227, "wan2.1": 126_892_531, "wan2.2": 704_688_668, "flux": 83_819_683}
    assert {family: count[family] for family in known} == known
    assert all(number > 2_000_000 for number in count.values())


def test_sizes(tool):
    """Latents and frames of each, as its VAE takes them."""
    for family, architecture in tool.architectures().items():
        pixels, still = architecture.spatial * architecture.side, architecture.still
        vae = SimpleNamespace(latent_channels=4, temporal=architecture.temporal, spatial=pixels)
        vae.architecture = architecture
        count, height, width = tool.SIZES[pixels][0]
        shape = (count, 4, height, width) if still else (1, 4, count, height, width)
        assert tuple(tool.latent(vae, (count, height, width)).shape) == shape, family
        frames = architecture.frames(count)
        assert tuple(tool.video(vae, (count, height, width)).shape) == (frames, 256, 256, 3), family


def test_compare(tool, tmp_path, capsys):
    """The demo VAE in fp32, here rather than in processes of its own: the same bits twice, and every change is seen."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    arguments = ["--small", "--cell", "demo", "fp32"]
    assert tool.main([str(old), *arguments]) == 0
    assert tool.main([str(new), *arguments, "--compare", str(old)]) == 0
    record = json.loads(old.read_text())
    assert len(record) == 6 and len({each["digest"] for each in record.values()}) == 6
    assert all(each["peak"] > 0 for each in record.values())
    capsys.readouterr()
    bits, peak, gone, kept = list(record)[:4]
    record[bits]["digest"], record[peak]["peak"] = "0" * 64, 17
    record["another"] = record.pop(gone)
    old.write_text(json.dumps(record))
    assert tool.main([str(new), *arguments, "--compare", str(old)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and not any(kept in line for line in lines)
    for line, said in zip(sorted(lines), sorted((f"{bits}: other bits", f"{peak}: other peak (17 ->",
                                                 f"{gone}: only in the new", "another: only in the old")),
                          strict=True):  # fmt: skip
        assert line.startswith(said)


def test_same_record(tool, tmp_path, capsys):
    """Nor found to be missing after the run."""
    old = tmp_path / "old.json"
    old.write_text("{}")
    (tmp_path / "text").write_text("no record")
    cases = [
        ([old, "--compare", old], "would replace the record"),
        ([tmp_path / "new.json", "--compare", tmp_path / "gone.json"], "cannot be read"),
        ([tmp_path / "new.json", "--compare", tmp_path / "text"], "cannot be read"),
        ([tmp_path / "no" / "new.json"], "its folder does not exist"),
        ([tmp_path / "new.json", "--families", "flux"], "--small looks at the demo VAE only"),
    ]
    for arguments, says in cases:
        with pytest.raises(SystemExit) as ended:
            tool.main([*map(str, arguments), "--small", "--cell", "demo", "fp32"])
        assert ended.value.code == 2 and says in capsys.readouterr().err
    assert old.read_text() == "{}" and not (tmp_path / "new.json").exists()


def test_go_on(tool, tmp_path, monkeypatch):
    """What a run that was cut off has written is kept, and only the rest is run."""
    record, ran = tmp_path / "record.json", []

    def run(command, **_):
        ran.append(command[-2:] if command[-1] != "--small" else command[-3:-1])
        Path(command[2]).write_text(json.dumps({f"{' '.join(ran[-1])} decode": {"digest": "1", "peak": 2, "ran": ""}}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(tool.subprocess, "run", run)
    record.write_text(json.dumps({"demo fp32 decode": {"digest": "0", "peak": 1, "ran": ""}}))
    assert tool.main([str(record), "--small", "--go-on"]) == 0
    assert ran == [["demo", "int8"]]
    assert {case: each["peak"] for case, each in json.loads(record.read_text()).items()} == {
        "demo fp32 decode": 1, "demo int8 decode": 2}  # fmt: skip
    assert tool.main([str(record), "--small"]) == 0 and len(ran) == 3


def test_a_failure_keeps_the_rest(tool, tmp_path, monkeypatch):
    record = tmp_path / "record.json"

    def run(command, **_):
        if "fp32" in command:
            return SimpleNamespace(returncode=1, stdout="", stderr="no memory")
        Path(command[2]).write_text(json.dumps({"demo int8 decode": {"digest": "1", "peak": 2, "ran": ""}}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(tool.subprocess, "run", run)
    with pytest.raises(SystemExit, match="demo-fp32: no memory"):
        tool.main([str(record), "--small", "--jobs", "1"])
    assert [*json.loads(record.read_text())] == ["demo int8 decode"]


def test_the_recorded_frames(tool):
    """Every published family of ComfyUI's is in the record of the GPU that has one, and each case is whole."""
    record = json.loads((Path(__file__).parents[1] / "engine" / "families" / "frames_h200.json").read_text("utf-8"))
    tiny = {"taehv", "taesana", "taesd", "taef2"}
    assert {case.split()[0] for case in record} == tool.architectures().keys() - tiny
    whole = [each for each in record.values() if len(each["digest"]) == 64 and each["peak"] > 0]
    assert len(whole) > 0.8 * len(record)
    assert all(each["peak"] == 0 for each in record.values() if len(each["digest"]) != 64)
