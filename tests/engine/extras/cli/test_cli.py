"""The console command: what it writes, what it refuses and how it ends."""

import io
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import CheckpointError, InputError, PlanError, load
from zerowaste_vae.engine.extras.cli import COMMANDS, main
from zerowaste_vae.engine.extras.cli.encode import Padded
from zerowaste_vae.engine.extras.media.clips import read_video
from zerowaste_vae.engine.extras.media.latent_note import note_of
from zerowaste_vae.engine.extras.media.latents import latent_metadata, read_latent, write_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.families import DEFAULT

from .said import one_error


@pytest.fixture
def latent(tmp_path, noise):
    path = tmp_path / "l.safetensors"
    write_latent(path, noise(1, 16, 2, 2, 3), {"fps": "30000/1001"})
    return path


def test_decode_to_every_kind(run, latent, vae):
    expected = vae.decode(read_latent(latent))
    code, out, _ = run("decode", latent, "a.mp4", "--vae", "{vae}")
    assert code == 0 and "a.mp4: 5 frames 24x16 at 29.97 frames/s, fp32 on cpu" in out
    frames, fps = read_video("a.mp4")
    assert frames.shape == expected.shape[1:] and fps == Fraction(30000, 1001)
    assert run("decode", latent, "frames", "--vae", "{vae}")[0] == 0
    assert torch.equal(read_video("frames")[0].mul(255).round(), expected[0].mul(255).round())
    assert run("decode", latent, "a.safetensors", "--vae", "{vae}")[0] == 0
    assert torch.equal(load_file("a.safetensors")["frames"], expected)


@pytest.mark.parametrize("name", ["float32", "float16", "uint8"])
def test_output_types(run, latent, vae, name):
    assert run("decode", latent, "a.safetensors", "--vae", "{vae}", "--output", name)[0] == 0
    assert torch.equal(load_file("a.safetensors")["frames"], vae.decode(read_latent(latent), output=name))


def test_encode_and_back(run, vae):
    write_png_folder("clip", torch.randint(0, 256, (7, 19, 27, 3), dtype=torch.uint8))
    clip, _ = read_video("clip")
    code, out, _ = run("encode", "clip", "l.safetensors", "--vae", "{vae}", "--fps", "12.5")
    assert code == 0 and "latent 1x16x3x3x4 of 7 frames 27x19" in out
    notes = {"fps": "25/2", "frames": "7", "height": "19", "width": "27"}
    assert latent_metadata("l.safetensors") == note_of(vae) | notes
    assert run("encode", "clip", "m.safetensors", "--vae", "{vae}", "--report", "r.json", "--verbose")[0] == 0
    report = json.loads(Path("r.json").read_text())
    assert (report["repeated"], report["dropped"]) == (2, 0)
    padded = torch.stack(list(Padded(clip, 0, None, DEFAULT.filled, 8)))
    assert torch.equal(read_latent("l.safetensors"), vae.encode(padded))
    assert run("decode", "l.safetensors", "back", "--vae", "{vae}")[0] == 0
    assert read_video("back")[0].shape == clip.shape


def test_encode_options(run, vae):
    write_mp4("clip.mp4", torch.rand(9, 16, 16, 3), 25)
    clip, _ = read_video("clip.mp4", 5)
    args = ("encode", "clip.mp4", "l.latent", "--vae", "{vae}", "--frames", 5, "--seed", 3)
    assert run(*args)[0] == 0
    with safe_open("l.latent", "pt") as file:
        assert set(file.keys()) == {"latent_tensor", "latent_format_version_0"}
        assert file.metadata()["fps"] == "25"
    assert torch.equal(read_latent("l.latent"), vae.encode(clip, seed=3))
    assert run(*args, "--force")[0] == 0


def test_memory_options_reach_the_engine(run, latent, vae, noise):
    write_latent("wide.safetensors", noise(1, 16, 3, 6, 8))
    options = {"tiling": "blended", "tile": 32, "overlap": 16, "chunk": 1}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    assert run("decode", "wide.safetensors", "a.safetensors", "--vae", "{vae}", *flags)[0] == 0
    expected = vae.decode(read_latent("wide.safetensors"), **options)
    assert torch.equal(load_file("a.safetensors")["frames"], expected)
    assert not torch.equal(expected, vae.decode(read_latent("wide.safetensors")))
    one_error(run("decode", latent, "b.mp4", "--vae", "{vae}", "--ram-gb", "0.000001"), "GB")
    write_mp4("clip.mp4", torch.rand(1, 16, 16, 3), 25)
    one_error(run("encode", "clip.mp4", "l.latent", "--vae", "{vae}", "--ram-gb", "0.000001"), "GB")


def test_precision_reaches_the_engine(run, latent, vae_file):
    code, out, _ = run("decode", latent, "a.safetensors", "--vae", "{vae}", "--precision", "bf16", "--device", "cpu")
    assert code == 0 and "bf16 on cpu" in out
    assert torch.equal(load_file("a.safetensors")["frames"], load(vae_file, "bf16", "cpu").decode(read_latent(latent)))


def test_reports_are_printed_and_written(run, latent):
    code, out, _ = run("decode", latent, "a.mp4", "--vae", "{vae}", "--verbose", "--report", "a.json", "--off",
                       "flash_attention")  # fmt: skip
    assert code == 0 and "decode 5 frames of 24x16" in out and "flash_attention: switched off" in out
    report = json.loads(Path("a.json").read_text())
    assert report["complete"] and {"name": "flash_attention", "reason": "switched off"} in report["off"]
    assert run("encode", "a.mp4", "l2.safetensors", "--vae", "{vae}", "--quiet", "--report", "b.json")[1] == ""
    assert json.loads(Path("b.json").read_text())["operation"] == "encode"
    for wrong, words in {
        ("--report", "a.json"): ("a.json", "--force"),
        ("--report", "a.txt"): ("a.txt", ".json"),
        ("--report", "no/a.json"): ("no/a.json",),
        ("--off", "turbo"): ("'turbo'", "triton_fusion"),
        ("--on", "tf32", "--off", "tf32"): ("tf32", "both"),
    }.items():
        one_error(run("decode", latent, "c.mp4", "--vae", "{vae}", *wrong), *words)
    assert not Path("c.mp4").exists()


def test_quiet_prints_nothing(run, latent):
    assert run("decode", latent, "a.mp4", "--vae", "{vae}", "--quiet") == (0, "", "")


def test_a_batch_needs_a_choice_for_a_clip(run, vae, noise):
    write_latent("l.safetensors", noise(3, 16, 1, 2, 2))
    one_error(run("decode", "l.safetensors", "a.mp4", "--vae", "{vae}"), "holds 3 clips", "--item")
    one_error(run("decode", "l.safetensors", "a.mp4", "--vae", "{vae}", "--item", 3), "--item 3", "3 clips")
    assert run("decode", "l.safetensors", "frames", "--vae", "{vae}", "--item", 1)[0] == 0
    expected = vae.decode(read_latent("l.safetensors")[1:2], output="uint8")
    assert torch.equal(read_video("frames")[0].mul(255).round().byte(), expected[0])
    assert run("decode", "l.safetensors", "all.safetensors", "--vae", "{vae}")[0] == 0
    assert load_file("all.safetensors")["frames"].shape == (3, 1, 16, 16, 3)


def test_existing_outputs_need_force(run, latent):
    for name in ("a.mp4", "frames", "a.safetensors"):
        args = ("decode", latent, name, "--vae", "{vae}")
        assert run(*args)[0] == 0
        one_error(run(*args), name, "--force")
        assert run(*args, "--force")[0] == 0
    one_error(run("encode", "a.mp4", latent, "--vae", "{vae}"), "--force")


def test_inputs_are_not_replaced(run, latent, tmp_path, vae_file):
    (tmp_path / "vae.safetensors").write_bytes(vae_file.read_bytes())
    os.link(latent, tmp_path / "link.safetensors")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    for given, out in ((latent, latent), (latent, "vae.safetensors"), (latent, "link.safetensors"),
                       ("link.safetensors", latent)):  # fmt: skip
        for more in (), ("--force",):
            said = run("decode", given, out, "--vae", "vae.safetensors", *more)
            one_error(said, f"{out}: input and output are the same file; choose another output")
    for command in ("encode", "a.png", "vae.safetensors", "--vae", "vae.safetensors"), \
                   ("compare", "a.png", "a.png", "--json", "a.png"):  # fmt: skip
        one_error(run(*command, "--force"), "input and output are the same file")
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


@pytest.mark.skipif(sys.platform == "win32", reason="whole paths are shorter there")
def test_a_name_has_room_for_that_of_its_part(run, latent):
    name = "b" * 248 + ".mp4"
    one_error(run("decode", latent, name, "--vae", "missing.gguf"), "b.part.mp4: the name is too long (257,")
    assert run("decode", latent, name[-250:], "--vae", "{vae}")[0] == 0
    assert run("decode", latent, "c" * 243 + ".safetensors", "--vae", "{vae}")[0] == 0


@pytest.mark.parametrize("split", ["auto", "segments", "rows"])
def test_split_is_accepted_without_effect(run, latent, vae, split, caplog):
    code, _, _ = run("decode", latent, "a.safetensors", "--vae", "{vae}", "--split", split)
    assert code == 0 and caplog.text.count(f"--split {split} has no effect") == 1
    assert torch.equal(load_file("a.safetensors")["frames"], vae.decode(read_latent(latent)))
    one_error(run("decode", latent, "b.safetensors", "--vae", "{vae}", "--split", "both"), "--split both is not one of")


def test_bad_input_leaves_nothing(run, tmp_path, latent, vae_file, noise):
    """Each error is one line, and no output is begun."""
    nan = noise(1, 16, 1, 2, 2)
    nan[0, 0, 0, 0, 0] = float("nan")
    save_file({"latent": nan}, "nan.safetensors")
    save_file({"latent": noise(1, 4, 1, 2, 2)}, "channels.safetensors")
    save_file({"latent": noise(16, 2, 2)}, "rank.safetensors")
    save_file({"latent": noise(1, 16, 0, 2, 2)}, "zero.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(latent.read_bytes()[:-10])
    (tmp_path / "cut_vae.safetensors").write_bytes(vae_file.read_bytes()[:-1000])
    before = sorted(f.name for f in tmp_path.iterdir())
    for name, word in {
        "nan.safetensors": "NaN",
        "channels.safetensors": "4 channels",
        "rank.safetensors": "[16, 2, 2]",
        "zero.safetensors": "empty",
        "cut.safetensors": "not a readable",
        "missing.safetensors": "no such file",
    }.items():
        one_error(run("decode", name, "a.mp4", "--vae", "{vae}"), name, word)
    for words, options in {
        ("missing.safetensors",): ("--vae", "missing.safetensors"),
        ("cut_vae.safetensors",): ("--vae", "cut_vae.safetensors"),
        ("l.safetensors", "not a VAE"): ("--vae", "l.safetensors"),
        ("precision", "int3"): ("--vae", "{vae}", "--precision", "int3"),
        ("--device meta: torch cannot compute there",): ("--vae", "{vae}", "--device", "meta"),
        ("--vram-gb 1e+308 is not a size",): ("--vae", "{vae}", "--vram-gb", 1e308),
        ("device", "toaster"): ("--vae", "{vae}", "--device", "toaster"),
        ("tiling", "odd"): ("--vae", "{vae}", "--tiling", "odd"),
        ("tile", "15"): ("--vae", "{vae}", "--tiling", "blended", "--tile", 15, "--overlap", 0),
        ("overlap", "32"): ("--vae", "{vae}", "--tiling", "blended", "--tile", 32, "--overlap", 32),
        ("chunk", "-1"): ("--vae", "{vae}", "--chunk", -1),
        ("--output",): ("--vae", "{vae}", "--output", "uint8"),
        ("--norm-groups", "norm_groups"): ("--vae", "{vae}", "--norm-groups", 5),
    }.items():
        result = run("decode", latent, "a.mp4", *options)
        one_error(result)
        assert any(word in result[2] for word in words), result[2]
    one_error(run("decode", latent, "a.avi", "--vae", "{vae}"), "a.avi", ".mp4")
    one_error(run("decode", latent, "nowhere/a.mp4", "--vae", "{vae}"), "nowhere")
    one_error(run("decode", latent, ".mp4", "--vae", "{vae}"), "put a name before it")
    assert sorted(f.name for f in tmp_path.iterdir()) == before


def test_bad_videos(run, tmp_path, make_vae_file):
    (tmp_path / "text.mp4").write_text("no video " * 100)
    (tmp_path / "none").mkdir()
    (tmp_path / "mixed").mkdir()
    Image.new("RGB", (8, 8)).save("mixed/1.png")
    Image.new("RGB", (8, 16)).save("mixed/2.png")
    Image.new("RGB", (8, 8)).save("ok.png")
    before = sorted(f.name for f in tmp_path.iterdir())
    reasons = {"text.mp4": "cannot be read", "none": "no images", "mixed": "2.png", "gone.mp4": "no such"}
    for name, word in reasons.items():
        one_error(run("encode", name, "a.safetensors", "--vae", "{vae}"), name, word)
    one_error(run("encode", "ok.png", "a.mp4", "--vae", "{vae}"), "a.mp4", ".safetensors")
    one_error(run("encode", "ok.png", "a.safetensors", "--vae", "{vae}", "--frames", 0), "at least 1")
    for start, frames in ((10**20, 1), (1, 2**63 - 1)):
        said = run("encode", "ok.png", "a.safetensors", "--vae", "{vae}", "--start", start, "--frames", frames)
        one_error(said, f"--start {start} is after the clip's last frame")
    one_error(run("encode", "ok.png", "a.safetensors", "--vae", "{vae}", "--seed", 10**30), f"--seed {10**30} is too")
    one_error(run("encode", "ok.png", "a.safetensors", "--vae", make_vae_file(encoder=None)), "decoder only")
    assert sorted(f.name for f in tmp_path.iterdir()) == before


def test_a_failing_disk_is_one_line(run, latent, monkeypatch):
    """What is complete, and cannot get its name, stays; the line names it."""
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        one_error(run("decode", latent, "frames", "--vae", "{vae}"), "frames", "No space left on device")
        assert [f.name for f in latent.parent.iterdir()] == [latent.name]
        said = run("decode", latent, "a.safetensors", "--vae", "{vae}")
        (whole,) = [f for f in latent.parent.iterdir() if f != latent]
        one_error(said, "a.safetensors", "No space left on device", f"the finished one is {whole.name}")
        assert load_file(whole)["frames"].shape[-1] == 3
        whole.unlink()
        code, out, err = run("decode", latent, "a.mp4", "--vae", "{vae}")
        kept, line = err.splitlines()
        assert (code, out) == (2, "") and "a.mp4: cannot be written (No space left on device)" in line
        assert kept == "a.part.mp4: 5 of 5 frames; the same command with --resume goes on from there"
    assert run("decode", latent, "a.mp4", "--vae", "{vae}", "--resume")[0] == 0
    assert sorted(f.name for f in latent.parent.iterdir()) == sorted(["a.mp4", latent.name])


@pytest.mark.parametrize("error", [InputError("two\nlines"), CheckpointError("a: bad"), PlanError("no"), OSError("?")])
def test_every_error_of_ours_is_one_line(run, latent, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("zerowaste_vae.engine.loader.load", fails)
    one_error(run("decode", latent, "a.mp4"), str(error).replace("\n", " "))


def test_out_of_memory_line(run, latent, monkeypatch):
    """Out of memory is one line; other RuntimeErrors keep their traceback."""
    def fails(error):
        def raises(*_, **__):
            raise error

        monkeypatch.setattr("zerowaste_vae.engine.loader.load", raises)

    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        fails(error)
        one_error(run("decode", latent, "a.mp4"), "out of memory", "--vram-gb")
    fails(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run("decode", latent, "a.mp4")


def test_notes_of_thousands_of_digits_are_none(run, latent, noise):
    notes = {name: "9" * 5000 for name in ("frames", "height", "fps")}
    save_file({"latent": noise(1, 16, 2, 2, 2)}, "n.safetensors", notes)
    said = run("decode", "n.safetensors", "a.mp4", "--vae", "{vae}")
    assert said[1].startswith("a.mp4: 5 frames 16x16 at 24 frames/s"), said


@pytest.mark.parametrize(
    "args",
    [["--fps", "0"], ["--fps", "1/0"], ["--fps", "fast"], ["--fps", "1e5000"], ["--fps", "1e-999999999"],
     ["--tile", "big"]],
)  # fmt: skip
def test_malformed_options(capsys, args):
    assert main(["decode", "l.safetensors", "a.mp4", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"zerowaste-vae: error: {args[0]}") and said.count("\n") == 1


def test_help_and_errors_without_torch():
    """--help needs no torch, and a command without it says what is missing in one line."""
    program = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
from zerowaste_vae.engine.extras.cli import COMMANDS, main
for name in (*COMMANDS, None):
    try:
        main([name, "--help"] if name else ["--help"])
    except SystemExit as ended:
        assert ended.code == 0
assert "numpy" not in sys.modules
assert main(["info"]) == 0
print(main(["decode", "l.safetensors", "a.mp4"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert re.search(r"^torch +not installed$", done.stdout, re.M)
    assert all(name in done.stdout for name in COMMANDS)
    assert re.fullmatch(r"zerowaste-vae: error: [^\n]*'torch' is not installed[^\n]*\n", done.stderr)


#: Encodings, and names that they lack: in another script, and with a byte that is no UTF-8.
CONSOLES = [("cp1252", "\u65e5\u672c\u8a9e.safetensors"), ("ascii:strict", "\u00e9.safetensors")]
CONSOLES += [] if sys.platform == "win32" else [("utf-8", "bad\udcff.safetensors")]


@pytest.mark.parametrize(("encoding", "name"), CONSOLES)
def test_no_console_ends_a_finished_run(tmp_path, vae_file, encoding, name):
    """Nor an error's line: whatever a console cannot show is shown as an escape."""
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    program = """
import sys
from zerowaste_vae.engine.extras.cli import main
codes = [main(sys.argv[1:]) for _ in range(2)]  # the second one finds the output of the first
sys.exit(codes != [0, 2])
"""
    command = [sys.executable, "-c", program, "encode", "a.png", name, "--vae", str(vae_file)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0 and (tmp_path / name).exists(), done.stderr
    assert done.stdout.count(b"\n") == 1, done.stdout
    assert done.stderr.count(b"\n") == 1 and b"exists already" in done.stderr, done.stderr


def test_output_may_be_any_object(monkeypatch, latent, vae_file, tmp_path):
    """Notebooks and programs without a console replace the streams, or have none."""
    monkeypatch.chdir(tmp_path)
    for number, stream in enumerate((io.StringIO(), None)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["decode", str(latent), f"{number}.safetensors", "--vae", str(vae_file)]) == 0
        assert Path(f"{number}.safetensors").exists()


def test_memory_errors_name_option(run, latent):
    """Errors name the option that was given."""
    for name in ("vram", "ram"):
        other = {"vram": "--ram-gb", "ram": "--vram-gb"}[name]
        said = run("decode", latent, "a.mp4", "--vae", "{vae}", f"--{name}-gb", "0.000001")
        one_error(said, f"raise --{name}-gb")
        assert other not in said[2]
        for tiling in ("untiled", "blended", "exact"):
            one_error(run("decode", latent, "a.mp4", "--vae", "{vae}", f"--{name}-gb", "0.000001", "--tiling", tiling),
                      f"raise --{name}-gb")  # fmt: skip
        one_error(run("decode", latent, "a.mp4", "--vae", "{vae}", f"--{name}-gb", "-1"), f"--{name}-gb -1")


@pytest.mark.parametrize("tile", [16, 24, 48, 56, 64, 72])
def test_the_usual_overlap_suits_every_tile(run, vae, noise, tile):
    write_latent("wide.safetensors", noise(1, 16, 1, 12, 12))
    blended = ("--tiling", "blended", "--tile", tile)
    assert run("decode", "wide.safetensors", "a.safetensors", "--vae", "{vae}", *blended)[0] == 0
    shared = 64 if tile > 64 else tile // 2
    expected = vae.decode(read_latent("wide.safetensors"), tiling="blended", tile=tile, overlap=shared)
    assert torch.equal(load_file("a.safetensors")["frames"], expected)
    if tile <= 64:
        said = run("decode", "wide.safetensors", "b.safetensors", "--vae", "{vae}", *blended, "--overlap", 64)
        one_error(said, "--overlap 64", f"--tile {tile}")
