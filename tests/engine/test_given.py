"""Frames, latents, callbacks and options in the forms that people give them: taken, or refused in one line."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from zerowaste_vae import InputError, LatentFile, LatentWriter, load, read_latent, write_latent, write_mp4
from zerowaste_vae.engine.execution.progress import Callbacks
from zerowaste_vae.engine.extras.media import latent_note
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.latents import latent_metadata
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.request import as_frames, check_latent, check_video


@pytest.fixture(scope="module")
def clip():
    """Five frames of 24x16 as bytes."""
    return np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("form", [
    lambda x: x, torch.from_numpy, list, read_only, lambda x: x[::-1][::-1], lambda x: tuple(map(torch.from_numpy, x)),
    lambda x: [Image.fromarray(frame) for frame in x], lambda x: x[None],
])  # fmt: skip
def test_every_form_is_the_same_clip(clip, form):
    assert torch.equal(check_video(form(clip), 8), torch.from_numpy(clip)[None])


@pytest.mark.parametrize("kind", ["<f2", ">f4", "f8"])
def test_arrays_of_floats(clip, kind):
    given = (clip / 255).astype(kind)
    assert torch.equal(check_video(given, 8)[0], torch.from_numpy(given.astype(given.dtype.newbyteorder("="))))


def test_a_picture_is_one_frame(clip):
    picture = Image.fromarray(clip[0])
    for form in (picture, clip[0], [picture]):
        assert torch.equal(check_video(form, 8), torch.from_numpy(clip[None, :1]))
        assert check_video(form, 8, still=True).shape == (1, 1, 16, 24, 3)
    grey, clear = picture.convert("L"), Image.new("RGBA", (24, 16), (1, 2, 3, 4))
    assert check_video(grey, 8).shape == check_video(clear, 8).shape == (1, 1, 16, 24, 3)
    assert check_video(clear, 8, colours=4)[0, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert check_video(picture, 8, colours=4)[..., 3].unique().tolist() == [255]


def test_a_list_of_clips_is_a_batch(clip):
    assert check_video([clip, clip], 8).shape == (2, 5, 16, 24, 3)


@pytest.mark.parametrize("given, says", [
    ("clip.mp4", "a video is a tensor, not a path: read the file first (read_latent, read_video)"),
    (iter([]), "a video is a tensor or a list, not an iterator: encode_stream takes one"),
    ([], "a video is an empty list"),
    (None, "a video is a tensor or a numpy array, not NoneType"),
    ([[1, 2]], "a video is a tensor or a numpy array, not int"),
    (np.zeros((5, 16, 16, 3), np.uint16), "a video of uint16 is none: give floats, of frames in 0..1"),
    (np.zeros((5, 16, 16, 3), bool), "a video of bool is none"),
    (np.zeros((5, 16, 16, 3), np.int64), "a video of int64 is none"),
    ([np.zeros((16, 16, 3)), np.zeros((16, 24, 3))],
     "item 1 of the list is torch.float64 [16, 24, 3], item 0 torch.float64 [16, 16, 3]: give all in one size"),
    (Image.new("I;16", (16, 16)), "a picture of mode I;16 has no range of its own"),
    (np.zeros((5, 3, 16, 16)), "not [5, 3, 16, 16]: give movedim(-3, -1) of them"),
    (np.zeros((1, 3, 5, 16, 16)), "not [1, 3, 5, 16, 16]: give movedim(-4, -1) of them"),
    (np.zeros((5, 16, 16, 4)), "not [5, 16, 16, 4]: give them without alpha, [..., :3]"),
    (np.zeros((5, 16, 16, 1)), "not [5, 16, 16, 1]: give grey as expand(-1, -1, -1, 3)"),
    (np.full((5, 16, 16, 3), 255.0), "divide those of 0..255 by 255"),
])  # fmt: skip
def test_frames_are_refused_with_a_cure(given, says):
    with pytest.raises(InputError, match=re.escape(says)) as error:
        check_video(given, 8)
    assert "\n" not in str(error.value)


def test_arrays_of_a_call(vae, clip, noise):
    """Before anything runs: the same results as for tensors, in encode, decode and their streams."""
    z = vae.encode(torch.from_numpy(clip))
    assert torch.equal(vae.encode(clip), z)
    pictures = (Image.fromarray(frame) for frame in clip)
    assert torch.equal(torch.cat(list(vae.encode_stream(pictures)), 2), torch.cat(list(vae.encode_stream(clip)), 2))
    frames = vae.decode(z)
    assert torch.equal(vae.decode(z.numpy()), frames)
    assert torch.equal(torch.cat(list(vae.stream(z.numpy())), 1), frames)
    for call in (vae.decode, vae.stream, vae.decode_raw):
        with pytest.raises(InputError, match=r"not ComfyUI's dict of one: give its \[\"samples\"\]"):
            call({"samples": z})
        with pytest.raises(InputError, match="a latent is a tensor, not a path"):
            call("latent.safetensors")
    with pytest.raises(InputError, match="frame 0 of the stream: what it gives is a tensor, not a path"):
        next(vae.encode_stream("clip"))
    with pytest.raises(InputError, match="int is not iterable"):
        next(vae.encode_stream(3))
    with pytest.raises(InputError, match="out is a tensor, not ndarray"):
        vae.decode(z, out=np.empty(5))


@pytest.mark.parametrize("given", [None, [1.0], "x"])
def test_latents_of_other_kinds(given):
    with pytest.raises(InputError, match="a latent is a tensor"):
        check_latent(given, 16)


def test_unknown_options_are_refused_by_name(vae, noise):
    """Options are parameters of their own: a wrong name is Python's own error, before anything runs."""
    for call in (vae.decode, vae.stream, vae.encode, vae.encode_stream):
        with pytest.raises(TypeError, match="tilling"):
            call(noise(1, 16, 1, 2, 2), tilling="auto")


# -- callbacks ----------------------------------------------------------------------------------------------------


def test_progress_is_a_bar(vae, noise, capsys):
    frames = vae.decode(noise(1, 16, 3, 2, 2), chunk=1, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and torch.equal(frames, vae.decode(noise(1, 16, 3, 2, 2), chunk=1, progress=False))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["progress", "cancel", "on_plan"])
def test_callbacks_that_cannot_be_called(vae, noise, name):
    with pytest.raises(InputError, match=f"{name}=3 cannot be called: give a function {name}\\("):
        vae.decode(noise(1, 16, 1, 2, 2), **{name: 3})
    assert Callbacks().progress is None


# -- what is assigned, and what is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"fp8": True}, None, "fp8", Options])
def test_wrong_options_change_nothing(vae_file, noise, wrong):
    vae, z = load(vae_file, device="cpu"), noise(1, 16, 1, 2, 2)
    frames, before = vae.decode(z), vae.options
    with pytest.raises(InputError, match=r"options is an Options, not \w+: give vae.options.switched"):
        vae.options = wrong
    with pytest.raises(InputError, match="triton_fusion=3 is no switch"):
        vae.triton_fusion = 3
    assert vae.options == before and torch.equal(vae.decode(z), frames)


def test_options_that_fail_half_way_change_nothing(vae_file, noise, monkeypatch):
    vae, z = load(vae_file, device="cpu"), noise(1, 16, 1, 2, 2)
    frames, before, made = vae.decode(z), vae.options, []

    def fails_once(*args, **options):
        made.append(1)
        if len(made) == 1:
            raise RuntimeError("no planner")
        return planner(*args, **options)

    from zerowaste_vae.engine.execution import core

    planner = core.make_planner
    monkeypatch.setattr(core, "make_planner", fails_once)
    with pytest.raises(RuntimeError, match="no planner"):
        vae.options = before.switched(off=["cuda_graphs"])
    assert vae.options == before and torch.equal(vae.decode(z), frames)


def test_plans_and_reports_show_themselves(vae, noise):
    plan = vae.plan_decode(2, 2, 3)
    assert repr(plan) == f"<Plan {plan.describe()}>" and "untiled" in plan._repr_html_()
    vae.decode(noise(1, 16, 2, 2, 3), plan=plan)
    report = vae.last_report
    assert repr(report).startswith("<Report decode 5 frames of 24x16; ") and "\n" not in repr(report)
    page = report._repr_html_()
    assert page.startswith("<table>") and "<th>plan</th>" in page
    assert page.count("<tr>") == report.text().count("\n") + 1
    report.plan = "<b>"
    assert "&lt;b&gt;" in report._repr_html_()


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["o.gif", "o", "o.mp4.png", "o.mov"])
def test_an_mp4_is_called_one(tmp_path, name):
    with pytest.raises(InputError, match="write_mp4 writes an MP4 and nothing else"):
        write_mp4(tmp_path / name, torch.zeros(2, 16, 16, 3), 24)
    assert list(tmp_path.iterdir()) == []


def test_an_mp4_of_arrays_and_pictures(tmp_path, clip):
    write_mp4(tmp_path / "a.mp4", clip, Fraction(24))
    write_mp4(tmp_path / "b.mp4", map(Image.fromarray, clip), np.float32(24))
    a, b = (torch.stack(list(Clip(tmp_path / name))) for name in ("a.mp4", "b.mp4"))
    assert len(a) == 5 and torch.equal(a, b)
    for rate in (None, "24", float("nan"), True):
        with pytest.raises(InputError, match="is no frame rate"):
            write_mp4(tmp_path / "c.mp4", clip, rate)
    with pytest.raises(InputError, match="int is not iterable"):
        write_mp4(tmp_path / "c.mp4", 3, 24)


def test_latent_files_by_the_vae(vae, tmp_path, noise):
    """The VAE says how a file's axes are meant."""
    z = noise(1, 16, 3, 2, 2)
    write_latent(tmp_path / "z.safetensors", z.numpy())
    assert torch.equal(read_latent(tmp_path / "z.safetensors", vae), z)
    file = LatentFile(tmp_path / "z.safetensors", vae)
    assert torch.equal(torch.cat(list(vae.stream(file)), 1), vae.decode(z))
    with LatentWriter(tmp_path / "w.safetensors") as writer:
        for part in z.split(1, 2):
            writer.write(part)
        writer.finish()
    assert torch.equal(read_latent(tmp_path / "w.safetensors", vae), z)
    for wrong, says in (("z.pt", "a latent file ends in .safetensors or .latent"), ("z.png", "ends in")):
        with pytest.raises(InputError, match=says):
            write_latent(tmp_path / wrong, z)
    with pytest.raises(InputError, match=r"a latent is a tensor or a numpy array, not list"):
        write_latent(tmp_path / "z.safetensors", [z])
    for other in (z.int(), z.numpy().astype(np.uint8)):
        with pytest.raises(InputError, match=r"a latent is a tensor of floats, not torch\.(int32|uint8)"):
            write_latent(tmp_path / "z.safetensors", other)


def test_parts_of_a_latent_file(vae, tmp_path, noise, clip):
    """The file has the note of the VAE, and no part that does not fit is taken in silence."""
    path = tmp_path / "w.safetensors"
    with LatentWriter(path) as writer:
        with pytest.raises(InputError, match="no latents were written"):
            writer.finish()
        for part in vae.encode_stream([clip]):
            writer.write(part)
        for wrong in (noise(2, 16, 1, 2, 2), noise(16, 1, 2, 2), noise(1, 16, 1, 2, 2).int()):
            with pytest.raises(InputError, match=r"each part is floats \[1, channels, time, height, width\], not"):
                writer.write(wrong)
        with pytest.raises(InputError, match=r"of \[1, 16, 1, 2, 2\] does not fit those before, \[1, 16, 2, 2, 3\]"):
            writer.write(noise(1, 16, 1, 2, 2))
        writer.finish({"fps": "24"})
    z, notes = vae.encode(clip), latent_metadata(path)
    assert torch.equal(read_latent(path, vae), z)
    assert notes.pop("fps") == "24" and notes == latent_note.found(z) and notes["family"] == vae.arch


def test_frames_share_memory_where_they_can(clip):
    assert as_frames(clip).data_ptr() == clip.ctypes.data
