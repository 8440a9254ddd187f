import json
import re

import pytest
from zerowaste_vae.engine.extras.bench import schema
from zerowaste_vae.engine.extras.bench.measure import Bench
from zerowaste_vae.engine.extras.cli import main


def run(capsys, *args):
    code = main(["bench", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_decode_writes_what_it_prints(capsys, tmp_path, vae_file):
    pytest.importorskip("matplotlib")
    size = ("--sizes", "16x24", "--frames", 1, 5, "--db-frames", 5)
    args = ("--weights", vae_file, *size, "--runs", 1, "--device", "cpu")
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "p.html", "--png", tmp_path / "png")
    code, out, err = run(capsys, "decode", *args, "--peers", "eager", *files)
    assert code == 0, err
    report = schema.read(tmp_path / "r.json")
    assert [(row["who"], row["frames"]) for row in report["rows"]] == [
        ("this pack", 1), ("torch eager", 1), ("this pack", 5), ("torch eager", 5),
    ]  # fmt: skip
    assert report["settings"]["widths"] == [8, 16, 16, 16] and report["environment"]["torch"]
    assert out.count("this pack") == 2 and "plain torch (NCDHW)" in out
    assert (tmp_path / "p.html").read_text().count("<img") == len(list((tmp_path / "png").iterdir()))
    code, again, err = run(capsys, "report", tmp_path / "r.json", "--html", tmp_path / "q.html")
    assert code == 0 and "torch eager" in again
    assert (tmp_path / "q.html").read_text() == (tmp_path / "p.html").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.html", "png", "q.html", "r.json"]


def test_encode_runs_on_the_demo_vae(capsys):
    code, out, err = run(capsys, "encode", "--weights", "demo", "--sizes", "16x16", "--frames", 1, "--runs", 1,
                         "--device", "cpu")  # fmt: skip
    assert code == 0 and "encode 16x16 x 1 frames, fp32" in out, err


def test_bench_load(capsys, tmp_path, vae_file):
    """Files are timed, and those that do not load are named."""
    (tmp_path / "bad.safetensors").write_text("no")
    code, out, err = run(capsys, "load", vae_file, tmp_path / "bad.safetensors", "--precisions", "fp32", "bf16",
                         "--runs", 1, "--device", "cpu", "--json", tmp_path / "l.json")  # fmt: skip
    assert code == 0, err
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert [row["skipped"] is None for row in rows] == [True, True, False, False]
    assert rows[1]["loaded_as"] == "bf16" and rows[0]["median_s"] > 0 and "median_s" not in rows[2]
    assert "did not load" in out
    code, _, err = run(capsys, "report", tmp_path / "l.json")
    assert code == 2 and "bench load" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("decode", "--weights", "gone.safetensors"), "gone.safetensors"),
        (("decode", "--sizes", "16"), "16"),
        (("decode", "--sizes", "20x16"), "multiples of 8"),
        (("decode", "--frames", "4"), "--frames 4"),
        (("decode", "--runs", "0"), "--runs 0"),
        (("decode", "--precisions", "int3"), "int3"),
        (("decode", "--device", "toaster"), "toaster"),
        (("decode", "--json", "nowhere/r.json"), "nowhere"),
        (("decode", "--peers", "comfyui"), "--comfyui"),
        (("decode", "--db-frames", "-3"), "--db-frames -3"),
        (("decode", "--targets", "0", "nan"), "vram_gb=nan"),
        (("decode", "--tiling", "diced"), "--tiling diced"),
        (("decode", "--tiling", "blended", "--tile", "3"), "--tile 3"),
        (("decode", "--json", "r", "--html", "r"), "r: is the file of --json"),
        (("load", "gone.safetensors"), "gone.safetensors"),
        (("report", "gone.json"), "gone.json"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, args, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    more = () if args[0] != "decode" or "--device" in args else ("--device", "cpu")
    more += ("--sizes", "8x8", "--frames", "1") if "comfyui" in args else ()
    monkeypatch.setattr(Bench, "rates", lambda *_: pytest.fail("measured before it was refused"))
    code, _, err = run(capsys, *args, *more)
    assert code == 2 and err.count("\n") == 1 and says in err, err
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_is_needed_to_measure_one(capsys, make_vae_file):
    code, _, err = run(capsys, "encode", "--weights", make_vae_file(encoder=None), "--device", "cpu")
    assert code == 2 and "no encoder" in err


def test_every_precision_checked_first(capsys, monkeypatch, vae_file):
    """Nothing is measured if any of the precisions is unknown."""
    monkeypatch.setattr(Bench, "rates", lambda *_: pytest.fail("measured before it was refused"))
    code, _, err = run(capsys, "decode", "--weights", vae_file, "--precisions", "fp32", "int3", "--device", "cpu")
    assert code == 2 and "int3" in err


def test_nothing_replaced_unasked(capsys, monkeypatch, tmp_path, vae_file):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    settings = {"weights": "w", "architecture": "a", "widths": [8], "runs": 1, "input": "seeded"}
    (tmp_path / "r.json").write_text(json.dumps(schema.report("decode", {}, settings, [])))
    (tmp_path / "old").write_text("precious")
    before = vae_file.read_bytes()
    small = ("--sizes", "8x8", "--frames", 1, "--runs", 1, "--device", "cpu", "--weights", vae_file)
    cases = [
        (("decode", *small, "--json", "old"), "old: exists already"),
        (("encode", *small, "--html", "old"), "old: exists already"),
        (("decode", *small, "--png", "old"), "old: is a file"),
        (("decode", *small, "--json", vae_file, "--force"), "input and output are the same file"),
        (("load", vae_file, "--device", "cpu", "--json", vae_file, "--force"), "input and output are the same file"),
        (("report", "r.json", "--html", "old"), "old: exists already"),
        (("report", "r.json", "--html", "r.json", "--force"), "input and output are the same file"),
        (("report", "r.json", "--gpus", "--html", "new.html"), "leave --html out"),
    ]
    for args, says in cases:
        code, out, err = run(capsys, *args)
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err, err
    assert main(["profile", "decode", "--json", "old", "--device", "cpu"]) == 2
    assert "old: exists already" in capsys.readouterr().err
    assert (tmp_path / "old").read_text() == "precious" and vae_file.read_bytes() == before
    assert run(capsys, "report", "r.json", "--html", "old", "--force")[0] == 0
    assert (tmp_path / "old").read_text().startswith("<!doctype html>")


def test_help_lists_what_there_is(capsys):
    """With a line on each, as `zerowaste-vae --help` has for its commands."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    for name in ("decode", "encode", "kernels", "load", "report"):
        assert re.search(rf"^ +{name} +\w+", text, re.M), text
