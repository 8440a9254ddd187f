"""The demo command: what it writes, prints and refuses, and that the shipped assets are worth showing."""

import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import demo_vae_path, load, loader
from zerowaste_vae.engine.extras.bench import demo
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.clips import read_video
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config


@pytest.fixture
def short_clip(tmp_path, monkeypatch):
    """The first five frames of the shipped clip, a corner of them, in its place."""
    frames, fps = read_video(loader.demo_clip_path(), 5)
    clip = tmp_path / "short.mp4"
    write_mp4(clip, frames[:, :32, :48], fps)
    monkeypatch.setattr(loader, "demo_clip_path", lambda: clip)
    return clip


def call(capsys, *args):
    code = main(["demo", "--device", "cpu", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_assets():
    """The shipped files are small and have their published names."""
    path = demo_vae_path()
    assert path.stat().st_size <= 10_000_000
    assert loader.demo_clip_path().stat().st_size < 1_000_000
    with safe_open(path, "pt") as file:
        assert file.metadata()["norm_num_groups"] == "8"
    tensors = load_file(path)
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    assert all(torch.isfinite(t).all() for t in tensors.values())
    with torch.device("meta"):
        widths = (32, 48, 64, 64)
        expected = ARCHITECTURE.build(Config(widths, widths, norm_groups=8)).state_dict()
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in expected.items()}


def test_demo_quality():
    """The demo VAE reconstructs the shipped clip at 28 dB."""
    source, _ = read_video(loader.demo_clip_path())
    assert source.shape[0] % 4 == 1 and source.shape[1] % 8 == 0 and source.shape[2] % 8 == 0
    source = source[:5]
    vae = load(demo_vae_path(), device="cpu", precision="fp32")
    latent = vae.encode(source)
    assert 0.3 < latent.std() < 2
    assert demo.psnr(source, vae.decode(latent)[0]) > 28


def test_demo_command(tmp_path, capsys, short_clip):
    """The command writes its files and reports them."""
    out = tmp_path / "out"
    code, text, _ = call(capsys, "--out", out)
    assert code == 0
    assert sorted(p.name for p in out.iterdir()) == ["contact_sheet.png", "reconstruction.mp4"]
    source, fps = read_video(short_clip)
    written, rate = read_video(out / "reconstruction.mp4")
    assert written.shape == source.shape == (5, 32, 48, 3) and rate == fps
    vae = load(demo_vae_path(), device="cpu")
    result = vae.decode(vae.encode(source))[0]
    assert f"PSNR     {demo.psnr(source, result):.2f} dB" in text
    assert re.search(r"time     encode [\d.]+ s, decode [\d.]+ s \(fp32 on cpu\)", text)
    peak = float(re.search(r"memory   peak ([\d.]+) GB of the whole process", text)[1])
    assert 0.05 < peak < 100
    # What was written is the reconstruction, up to video coding.
    assert demo.psnr(result, written) > 30


def test_contact_sheet():
    """The sheet shows source, result and difference."""
    source = torch.zeros(5, 16, 24, 3)
    source[..., 0] = 0.5
    result = source.clone()
    result[..., 1] = 0.1
    made = demo.Demo(source, result, torch.zeros(1, 16, 2, 2, 3), 12, 1.0, 1.0, None, "fp32", "cpu")
    sheet = demo.contact_sheet(made)
    colours = {colour for _, colour in sheet.getcolors(1 << 20)}
    assert {(128, 0, 0), (128, 26, 0)} <= colours
    assert (0, round(255 * 0.1 * demo.DIFFERENCE_GAIN), 0) in colours
    per_colour = dict((colour, n) for n, colour in sheet.getcolors(1 << 20))
    assert per_colour[(128, 26, 0)] == demo.SHEET_FRAMES * 16 * 24


def test_psnr():
    assert demo.psnr(torch.zeros(2, 3), torch.full((2, 3), 0.1)) == pytest.approx(20.0, abs=1e-4)
    assert demo.psnr(torch.ones(3), torch.full((3,), 7.0)) == float("inf")  # compared as shown: clamped


def test_peak_memory():
    """The peak follows this process."""
    program = (
        "import torch; from zerowaste_vae.engine.extras.bench.demo import peak_memory as p; d = torch.device('cpu');"
        "a = p(d); x = torch.ones(64 << 20); del x; b = p(d); print(b - a)"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 200 << 20 < grown < 600 << 20


def test_demo_refuses_full_folder(tmp_path, capsys, short_clip):
    """A folder with files is refused unless forced."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    code, text, error = call(capsys, "--out", out)
    assert code == 2 and not text and error.count("\n") == 1 and "not empty" in error and "--force" in error
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    assert call(capsys, "--out", out, "--force")[0] == 0
    assert (out / "mine.txt").read_text() == "keep"
    assert Image.open(out / "contact_sheet.png").width > 300


def test_demo_errors(tmp_path, capsys, short_clip, make_vae_file):
    """An error is one line, and leaves no files."""
    file = tmp_path / "file"
    file.write_text("x")
    decoder_only = tmp_path / "decoder.safetensors"
    half = {n: t for n, t in load_file(make_vae_file()).items() if n.startswith("decoder.")}
    save_file(half, decoder_only, {"norm_num_groups": "4"})
    cases = (
        ("is a file", "--out", file),
        ("does not exist", "--out", tmp_path / "a" / "b"),
        ("encoder", "--out", tmp_path / "c", "--vae", decoder_only),
        ("nothing.safetensors", "--out", tmp_path / "d", "--vae", tmp_path / "nothing.safetensors"),
    )
    for word, *args in cases:
        code, text, error = call(capsys, *args)
        assert code == 2 and not text and error.startswith("zerowaste-vae: error: ") and word in error, (args, error)
        assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decoder.safetensors", "file", "short.mp4"]
