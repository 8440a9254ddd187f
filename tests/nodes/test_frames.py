"""Padding as the host's SeedVR2Preprocess does it, and the way back."""

from __future__ import annotations

import pytest
import torch
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.extras.media import latent_note
from zerowaste_vae.engine.families import ARCHITECTURES, DEFAULT, svd
from zerowaste_vae.nodes.frames import ANY_VAE, CLIP_SIZE, VAE_NOTE, Layout, check_maker, held, strange

#: 4n + 1 frames, sides of 16 pixels.
LAYOUT = Layout(DEFAULT, 16, 3)


@pytest.mark.parametrize(
    ("frames", "height", "width", "padded"),
    [
        (1, 16, 32, (1, 16, 32)),
        (2, 17, 31, (5, 32, 32)),
        (4, 8, 9, (5, 16, 16)),
        (5, 16, 16, (5, 16, 16)),
        (6, 45, 50, (9, 48, 64)),
        (9, 720, 1280, (9, 720, 1280)),
        (8, 1080, 24, (9, 1088, 32)),
    ],
)
def test_padding_and_back(frames, height, width, padded):
    clip = torch.rand(2, frames, height, width, 3)
    out = LAYOUT.pad(clip)
    assert tuple(out.shape) == (2, *padded, 3)
    assert torch.equal(out[:, :frames, :height, :width], clip)
    assert not out[:, :, height:].any()
    assert not out[:, :, :, width:].any()
    assert all(torch.equal(out[:, i], out[:, frames - 1]) for i in range(frames, padded[0]))
    assert torch.equal(LAYOUT.crop(out, {CLIP_SIZE: (frames, height, width)}), clip)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_padded_clips_fill_latents(architecture):
    """Padding fills latents of each family: what the network would leave out could not be cropped back."""
    layout, pixels = Layout(architecture, 16, 3), architecture.spatial * architecture.side
    made = layout.pad(torch.rand(1, 2, 45, 70, 3))
    assert [n % pixels for n in made.shape[2:4]] == [0, 0] and architecture.filled(made.shape[1]) == made.shape[1]
    back = layout.crop(made, {CLIP_SIZE: (2, 45, 70)})
    assert tuple(back.shape) == (1, 2, 45, 70, 3)


def test_padding_clamps():
    assert LAYOUT.pad(torch.tensor([-1.0, 0.5, 2.0]).expand(1, 1, 16, 16, 3))[0, 0, 0, 0].tolist() == [0, 0.5, 1]


def test_a_clip_that_needs_no_padding_is_not_copied():
    clip = torch.rand(1, 5, 16, 32, 3)
    assert LAYOUT.pad(clip) is clip
    clip[0, 2, 3, 4, 1] = float("nan")
    assert torch.equal(LAYOUT.pad(clip).isnan(), clip.isnan())


def test_bytes_stay_bytes():
    clip = torch.randint(256, (1, 6, 45, 50, 3), dtype=torch.uint8)
    out = LAYOUT.pad(clip)
    assert out.dtype == torch.uint8 and torch.equal(LAYOUT.crop(out, {CLIP_SIZE: (6, 45, 50)}), clip)


@pytest.mark.parametrize("size", [None, (6, 90, 100), (10, 45, 50), (6, 45, 65)])
def test_a_size_from_elsewhere_is_ignored(size):
    clip = torch.rand(1, 9, 48, 64, 3)
    assert torch.equal(LAYOUT.crop(clip, {CLIP_SIZE: size}), clip)


def test_clips_come_with_and_without_batch_and_alpha():
    images = torch.rand(5, 16, 24, 4)
    assert torch.equal(LAYOUT.clip(images), images[None, ..., :3])
    assert torch.equal(LAYOUT.clip(images[None]), images[None, ..., :3])


@pytest.mark.parametrize("shape", [(16, 24, 3), (5, 16, 24, 1), (0, 16, 24, 3), (5, 7, 24, 3)])
def test_what_is_no_clip_is_refused(shape):
    with pytest.raises(InputError, match=r"\[F, H, W, 3\]|at least one frame"):
        LAYOUT.clip(torch.zeros(shape))


def test_collapsed_latents_have_channels_outside_and_time_inside():
    z = torch.rand(2, 16, 3, 4, 5)
    assert torch.equal(LAYOUT.latent(z.flatten(1, 2)), z)
    assert LAYOUT.latent(z) is z
    assert LAYOUT.latent(torch.rand(1, 16, 4, 5)).shape == (1, 16, 1, 4, 5)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 12, 2, 8, 8), (16, 8, 8), (1, 16, 0, 8, 8), (1, 0, 8, 8)])
def test_other_latents_are_refused(shape):
    with pytest.raises(InputError, match="latent"):
        LAYOUT.latent(torch.zeros(shape))


@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, lambda t: t.to("meta"), lambda t: torch.nested.nested_tensor([t[0], t[0]])]
)
def test_tensors_without_values_side_by_side_are_one_line(make):
    """The first part of a nested latent is taken: frames and sound come so."""
    for call in (lambda t: LAYOUT.clip(t), lambda t: LAYOUT.latent(t), strange):
        given = make(torch.zeros(1, 16, 8, 16, 16))
        with pytest.raises(InputError, match=r"nested|meta device|sparse|connect") as caught:
            call(given)
        assert "\n" not in str(caught.value)


def test_frames_of_another_range_are_worth_a_line(caplog):
    clip = torch.rand(5, 16, 16, 3)
    assert strange(clip) == strange((255 * clip).byte()) == strange(1.4 * clip - 0.09) == []
    assert strange(clip.clone().fill_(float("nan"))) == []  # which the run itself refuses
    assert not caplog.text
    (line,) = strange(255 * clip)
    assert "frames are in 0..1" in line and line in caplog.text
    (line,) = strange(2 * clip - 1)
    assert "below -0.1" in line and "(frames + 1) / 2" in line


def test_latent_of_another_vae(vae):
    """It is refused, unless the widget allows it."""
    note = latent_note.note_of(vae)
    for samples in ({}, {VAE_NOTE: note}, {VAE_NOTE: None}, {VAE_NOTE: note | {"version": "0"}}):
        check_maker(samples, vae, False)
    other = {VAE_NOTE: note | {"family": "wan2.1"}}
    with pytest.raises(InputError, match=f"The latent was made by wan2.1 .* seedvr2 .* switch on {ANY_VAE} on this"):
        check_maker(other, vae, False)
    check_maker(other, vae, True)


def test_a_batch_that_is_one_clip():
    """Stable Video Diffusion's, in both directions; a wrong number of channels is told with its own form."""
    layout = Layout(svd.ARCHITECTURE, 4, 3)
    samples, images = torch.rand(5, 4, 2, 3), torch.rand(5, 17, 24, 3)
    latent = layout.latent(samples)
    assert latent.shape == (1, 4, 5, 2, 3) and torch.equal(latent[0, :, 3], samples[3])
    assert torch.equal(layout.samples(latent), samples) and torch.equal(layout.latent(latent), latent)
    clip = layout.clip(images)
    assert torch.equal(clip, images[None]) and torch.equal(layout.shown(clip), images)
    assert layout.pad(clip).shape == (1, 5, 24, 24, 3)
    assert layout.latent_size(samples.shape) == layout.latent_size(latent.shape) == (1, 5, 2, 3)
    assert layout.clip_size(1, 5, 17, 24) == layout.pixel_size(torch.Size((5, 3, 17, 24))) == (1, 5, 2, 3)
    with pytest.raises(InputError, match=r"decodes latents \[T, 4, h, w\], not \[5, 16, 2, 3\]"):
        layout.latent(torch.rand(5, 16, 2, 3))


def test_memory_that_the_system_does_not_grant_is_an_error_with_the_way_out():
    """In place of an allocator's words."""
    shape = 1, 1 << 20, 1 << 15, 1 << 15, 3
    with pytest.raises(InputError, match=r"1048576 frames take .*: use Zero-Waste Decode to Video"):
        held(shape, torch.float32, True)
    with pytest.raises(InputError, match=r"1048576 images take .*: decode fewer at a time"):
        held(shape, torch.float32, False)
    assert held((1, 2, 3, 4, 3), torch.float16, True).shape == (1, 2, 3, 4, 3)
