import json
from itertools import islice

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.media.clips import iter_frames, read_video
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
from zerowaste_vae.engine.loader import demo_clip_path


@pytest.fixture
def clips(tmp_path, monkeypatch):
    """a: 9 frames as a PNG folder; seam: the same with a step at column 64; shapes: other clips that do not match."""
    monkeypatch.chdir(tmp_path)
    frames = read_video(demo_clip_path(), 9)[0][:, :96, :160].mul(255).round().div(255)
    write_png_folder("a", frames)
    seam = frames.clone()
    seam[:, :, 64:] += 0.02
    save_file({"frames": seam[None]}, "seam.safetensors")
    save_file({"frames": (frames[None] * 255).round().to(torch.uint8)}, "bytes.safetensors")
    save_file({"frames": frames[None, :5].contiguous()}, "short.safetensors")
    save_file({"latent": frames}, "latent.safetensors")
    save_file({"frames": frames}, "rank.safetensors")
    save_file({"frames": torch.zeros(1, 2, 0, 4, 3)}, "flat.safetensors")
    save_file({"frames": frames[None, ..., :1].contiguous()}, "gray.safetensors")
    broken = frames[None].clone()
    broken[:, 3, 7] = torch.nan
    save_file({"frames": broken}, "broken.safetensors")
    save_file({"frames": 2 * frames[None] - 1}, "signed.safetensors")
    save_file({"frames": 255 * frames[None]}, "large.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    return frames


def run(capsys, *args):
    code = main(["compare", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_equal_clips_of_two_kinds(capsys, clips):
    code, out, _ = run(capsys, "a", "bytes.safetensors", "--tile", 64, "--overlap", 16, "--chunk", 1)
    assert code == 0
    shown = {line[:16].strip(): line[16:] for line in out.splitlines()}
    assert shown["clips"] == "9 frames 160x96" and shown["found"] == "no seam, jump or colour shift"
    assert shown["PSNR"].startswith("inf") or float(shown["PSNR"].split()[0]) > 120
    assert shown["step at rows"].startswith("0.00") or "usual" in shown["step at rows"]


def test_a_seam_is_found_and_written(capsys, clips, tmp_path):
    code, out, _ = run(capsys, "seam.safetensors", "a", "--columns", 64, 96, "--rows", 48, "--json", "c.json")
    assert code == 0 and "seam at column 64" in out
    record = json.loads((tmp_path / "c.json").read_text())
    assert record["seam_columns"]["at"] == 64 and record["frames"] == 9
    assert any(text.startswith("seam at column 64") for text in record["findings"])
    assert record["seam_columns"]["ratio"] > 100
    code, _, err = run(capsys, "seam.safetensors", "a", "--json", "c.json")
    assert code == 2 and "--force" in err


def test_chunk_starts_follow_latents(capsys, clips, tmp_path):
    """A jump at frame 6 of 9: where chunks of one latent of 5 frames begin, and none of 4."""
    jumps = clips.clone()
    jumps[6:] += 0.05
    save_file({"frames": jumps[None]}, "jumps.safetensors")
    for frames, found in ((5, 6), (4, None)):
        code, out, _ = run(capsys, "jumps.safetensors", "a", "--chunk", 1, "--per-latent", frames)
        shown = {line[:16].strip(): line[16:] for line in out.splitlines()}
        assert code == 0 and shown["at chunk starts"].endswith("frame 6") == bool(found), frames
    code, _, err = run(capsys, "a", "a", "--per-latent", 0)
    assert code == 2 and "--per-latent 0" in err


def test_iter_frames_equals_read_video():
    streamed = torch.stack(list(islice(iter_frames(demo_clip_path()), 7)))
    assert torch.equal(streamed, read_video(demo_clip_path(), 7)[0])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("a", "short.safetensors"), "ends after 5"),
        (("a", "gone.mp4"), "gone.mp4"),
        (("gone.safetensors", "a"), "gone.safetensors"),
        (("latent.safetensors", "a"), "frames"),
        (("rank.safetensors", "a"), "[9, 96, 160, 3]"),
        (("gray.safetensors", "a"), "frames are [1, 9, 96, 160, 1]"),
        (("flat.safetensors", "flat.safetensors"), "not 0x4x3 and 0x4x3"),
        (("broken.safetensors", "broken.safetensors"), "broken.safetensors: frame 3 holds NaN or infinite values"),
        (("a", "broken.safetensors"), "broken.safetensors: frame 3 holds NaN or infinite values"),
        (("a", "signed.safetensors"), "signed.safetensors: frame 0: "),
        (("large.safetensors", "a"), "large.safetensors: frame 0: the frames reach 2"),
        (("folder.safetensors", "a"), "folder.safetensors: is a folder, not a file"),
        (("a", "a", "--rows", "96"), "row 96"),
        (("a", "a", "--tile", "15"), "--tile 15"),
        (("a", "a", "--chunk", "-1"), "--chunk -1"),
        (("a", "a", "--json", "nowhere/c.json"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(capsys, clips, args, says):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and err.count("\n") == 1 and says in err
