"""Tiny autoencoders of video: against recorded outputs of the originals, in parts of any size, and by their files'
names."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Checkpoint, load
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.distributed.shares import Leads
from zerowaste_vae.engine.families import by_file, detect
from zerowaste_vae.engine.families.taehv import ARCHITECTURE, H3, LEAK, SCALE, SHIFT, Config
from zerowaste_vae.engine.loader import encoder_only

from .originals import close

ENCODER, DECODER = (8, 12, 16, 20), (8, 12, 16, 24)
FAMILIES = {
    "wan": Config(ENCODER, DECODER, 5),
    "wan2.2": Config(ENCODER, DECODER, 6, 2),
    "h3": Config(ENCODER, DECODER, H3, 2),
    "ltx": Config(ENCODER, DECODER, 7, 4, (2, 2, 2), (2, 2, 2)),
    "super": Config(ENCODER, DECODER, 6, 2, wide=True),
    "light": Config(ENCODER, DECODER, 6, 2, leaky=True),
}
#: File of recorded outputs of ComfyUI's class, where values below zero are kept in part.
LEAKY = "core_lighttae_hv15"


def made(family, seed=0):
    return dict(random_checkpoint(FAMILIES[family], seed, ARCHITECTURE).tensors)


def loaded(tensors, precision="fp32"):
    return load(Checkpoint(dict(tensors), {}), precision, "cpu")


def as_published(tensors):
    """A file as its author gives it away, without what only its name tells."""
    return {name: t for name, t in tensors.items() if not name.startswith("vae_")}


@pytest.fixture(scope="module", params=FAMILIES)
def vae(request):
    return loaded(made(request.param))


def latents(vae, noise, count, height=2, width=3):
    return noise(1, vae.latent_channels, count, height, width)


# -- the originals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "taehv_wan21", "taehv_wan22", "taehv_h3", "taehv_ltx", "taehv_wan22_super", LEAKY, "core_taeh3",
])  # fmt: skip
def test_outputs_are_the_originals(shared, name):
    """Latents as the network takes them; the class's frames are not clamped, the author's are. Those of LightTAE of
    HunyuanVideo 1.5 are in -1..1."""
    tensors = load_file(shared / "golden" / "distilled" / f"{name}.safetensors")
    weights = {n[2:]: t.float() for n, t in tensors.items() if n.startswith("w.")}
    z, frames = tensors["in.latent"].float(), tensors["out.frames"]
    if not name.startswith("core"):
        z, frames = z.transpose(1, 2), frames.transpose(1, 2)
    channels = z.shape[1]
    weights |= {SCALE: torch.ones(channels), SHIFT: torch.zeros(channels)}
    vae = loaded(weights | ({LEAK: torch.tensor(0.2)} if name == LEAKY else {}))
    with torch.no_grad():
        made = vae.model.decoder(z)
    if name == LEAKY:
        close(made, frames)
        frames = frames * 0.5 + 0.5
    else:
        close((made * 0.5 + 0.5).clamp(0, 1), frames)
    close(vae.decode(z), frames.clamp(0, 1).movedim(1, -1))
    if "in.one" in tensors:
        close(vae.decode(tensors["in.one"].float()), tensors["out.one"].movedim(1, -1))
    if "in.frames" in tensors:
        video = tensors["in.frames"].float().movedim(2, -1)
        close(vae.encode(video), tensors["out.latent"].transpose(1, 2))
        with torch.no_grad():
            moments = vae.model.encoder(video.movedim(-1, 1) * 2 - 1)
        close(vae.model.sample(moments), tensors["out.latent"].transpose(1, 2))


# -- in time -----------------------------------------------------------------------------------------------------------


def test_no_bit_depends_on_chunks_and_parts(vae, noise):
    z = latents(vae, noise, 12, 1, 2)
    whole = vae.decode(z)
    count = whole.shape[1]
    assert count == vae.frames(12) == vae.architecture.frames(12)
    for chunk in (1, 3):
        assert torch.equal(vae.decode(z, chunk=chunk), whole)
    for start, end in ((0, 1), (1, 4), (count - 9, count), (count - 14, count - 12)):
        assert torch.equal(vae.decode(z, start=start, frames=end - start), whole[:, start:end])
    assert torch.equal(torch.cat(list(vae.stream(z)), 1), whole)
    assert vae.last_report.plan.startswith("plain torch")


def test_a_late_part_begins_late(noise):
    vae = loaded(made("wan"))
    z = latents(vae, noise, 30, 1, 2)
    whole = vae.decode(z)
    assert torch.equal(vae.decode(z, start=90, frames=5), whole[:, 90:95]) and 0 < vae.last_report.lead <= 9
    h3 = loaded(made("h3"))
    z = latents(h3, noise, 27, 1, 2)
    whole = h3.decode(z)
    assert whole.shape[1] == 90
    leads = Leads(h3.model.decoder.program, 1, 2)
    assert [leads.of(frame) for frame in (0, 1, 16, 17, 89)] == [0, 1, 4, 5, 26]
    assert [leads.begins(latent) for latent in (0, 1, 5, 6, 27)] == [0, 1, 17, 18, 90]
    assert torch.equal(h3.decode(z, start=73, frames=17), whole[:, 73:]) and h3.last_report.lead == 12


@pytest.mark.parametrize("count", [1, 2, 10, 18, 39])
def test_every_frame_that_is_read_counts(vae, noise, count):
    """Frames that are missing for the last latent are copies of the last one."""
    s, sections = vae.spatial, vae.architecture.sections
    video = torch.rand(count, s, 2 * s, 3, generator=torch.Generator().manual_seed(3))
    whole = vae.encode(video)
    total = whole.shape[2]
    assert total == vae.architecture.latents(count)
    assert vae.last_report.dropped == max(0, count - sections.at(total))
    filled = torch.cat((video, video[-1:].expand(sections.at(total), -1, -1, -1)))[: sections.at(total)]
    assert torch.equal(vae.encode(filled), whole)
    assert torch.equal(vae.encode(video, chunk=2), whole)
    assert torch.equal(torch.cat(list(vae.encode_stream(iter(video), chunk=1)), 2), whole)
    raw = vae.encode_raw(video.movedim(-1, 0)[None] * 2 - 1, chunk=1)
    close(vae.model.sample(raw), whole, 1e-6)


@pytest.mark.parametrize("family", ["wan", "h3"])
def test_a_late_part_of_an_encode(family):
    """From where its Program begins, as several devices make it, latents have the bits of the whole clip's."""
    vae = loaded(made(family))
    program, sections = vae.model.encoder.program, vae.architecture.sections
    video = torch.rand(56, 16, 32, 3, generator=torch.Generator().manual_seed(5))
    whole = vae.encode(video)
    first, end = program.window(11, 12, whole.shape[2])
    assert 0 < first <= 10 and end == 12 and vae.architecture.reads(first, end)[0] == sections.at(first)
    part = vae.encode(video[sections.at(first) : sections.at(end)])
    assert torch.equal(part[:, :, 11 - first : 12 - first], whole[:, :, 11:12])


def test_h3s_clips_of_17_remember_nothing_of_each_other(noise):
    vae = loaded(made("h3"))
    video = torch.rand(39, 32, 32, 3, generator=torch.Generator().manual_seed(4))
    whole = vae.encode(video)
    assert whole.shape[2] == 12 and vae.architecture.filled(37) == 39
    for at in (0, 17):
        assert torch.equal(vae.encode(video[at : at + 22])[:, :, :7], whole[:, :, at // 17 * 5 :][:, :, :7])
    assert [vae.frames(n) for n in (1, 2, 5, 7, 12)] == [1, 5, 17, 22, 39]


@pytest.mark.parametrize("family", ["wan", "h3", "super"])
def test_tiles_differ_little(family, noise):
    vae = loaded(made(family))
    z = latents(vae, noise, 3, 10, 12)
    whole = vae.decode(z)
    tiled = vae.decode(z, tiling="blended", tile=10 * vae.spatial, overlap=8 * vae.spatial)
    assert "blended tiles" in vae.last_report.plan
    assert (tiled - whole).square().mean().sqrt() < 0.1 * whole.std()
    how = {"tiling": "blended", "tile": 6 * vae.spatial, "overlap": 4 * vae.spatial}
    latent, tiled = vae.encode(whole), vae.encode(whole, **how)
    assert "blended tiles" in vae.last_report.plan
    assert (tiled - latent).square().mean().sqrt() < 0.1 * latent.std()


def test_clips_of_a_batch_are_separate(noise):
    vae = loaded(made("wan"))
    z = noise(2, vae.latent_channels, 4, 2, 3)
    assert torch.equal(vae.decode(z)[1:], vae.decode(z[1:]))


# -- files -------------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "taehv.safetensors": (16, 8, 4), "taew2_1.safetensors": (16, 8, 4), "lighttaew2_1.safetensors": (16, 8, 4),
    "taew2_2.safetensors": (48, 16, 4), "taew2_2_super.safetensors": (48, 16, 4), "taehv1_5.safetensors": (32, 16, 4),
    "taehv1_5_super.safetensors": (32, 16, 4), "lighttaehy1_5.safetensors": (32, 16, 4),
    "lighttaew2_2.safetensors": (48, 16, 4), "taeltx_2.safetensors": (128, 32, 8),
    "taeltx2_3.safetensors": (128, 32, 8), "taeh3.safetensors": (24, 16, 4),
}


@pytest.mark.parametrize("file", PUBLISHED)
def test_published_files(file):
    assert by_file(file) is ARCHITECTURE
    config = ARCHITECTURE.published.sizes(file)
    fitted = ARCHITECTURE.of(config)
    assert (config.latent_channels, fitted.spatial, fitted.temporal) == PUBLISHED[file]
    assert (config.wide, config.leaky) == ("super" in file, "lighttaehy" in file)
    with torch.device("meta"):
        state = ARCHITECTURE.build(config).state_dict()
    assert detect(state) is ARCHITECTURE and ARCHITECTURE.config_of({n: tuple(t.shape) for n, t in state.items()},
                                                                    {}) == config  # fmt: skip


def test_published_size():
    with torch.device("meta"):
        model = ARCHITECTURE.build(ARCHITECTURE.published.config)
    halves = [sum(p.numel() for n, p in half.named_parameters()) for half in (model.encoder, model.decoder)]
    blocks = {w: 3 * (9 * 4 * w * w + 3 * w) for w in (64, 128, 256)}
    decoder = (
        9 * 16 * 256 + 256 + sum(blocks.values()) + 256**2 + 2 * 128**2 + 2 * 64**2
        + 9 * (256 * 128 + 128 * 64 + 64 * 64) + 9 * 64 * 3 + 3
    )  # fmt: skip
    encoder = 9 * 3 * 64 + 64 + 3 * blocks[64] + (2 + 2 + 1) * 64**2 + 3 * 9 * 64**2 + 9 * 64 * 16 + 16
    assert halves == [encoder, decoder]


def wan_like(channels, patch):
    return random_checkpoint(Config(None, DECODER, channels, patch), 0, ARCHITECTURE).tensors


@pytest.mark.parametrize(("file", "channels", "patch", "scale", "shift", "leaky"), [
    ("taehv", 16, 1, 0.476986, 0.0, False), ("TAEW2_1-fp16", 16, 1, 1 / 2.8184, -0.7571, False),
    ("lighttaew2_1", 16, 1, 1.0, 0.0, False), ("taew2_2", 48, 2, 1 / 0.4765, -0.2289, False),
    ("lighttaew2_2", 48, 2, 1.0, 0.0, False), ("taehv1_5", 32, 2, 1.03682, 0.0, False),
    ("lighttaehy1_5", 32, 2, 1.03682, 0.0, True), ("mine", 24, 2, 1.0, 0.0, False),
])  # fmt: skip
def test_a_name_tells_the_scale(file, channels, patch, scale, shift, leaky, tmp_path, noise):
    path = tmp_path / f"{file}.safetensors"
    save_file(as_published(wan_like(channels, patch)), path)
    vae = load(path, "fp16", "cpu")
    state = vae.model.state_dict()
    assert (vae.arch, vae.can_encode, vae.model.config.leaky) == ("taehv", False, leaky)
    assert state[SCALE].dtype == torch.float32 and len(state[SCALE]) == channels
    assert float(state[SCALE][0]) == pytest.approx(scale) and float(state[SHIFT][0]) == pytest.approx(shift)
    save_file(state, tmp_path / "again.safetensors")
    again = load(tmp_path / "again.safetensors", "fp16", "cpu")
    assert again.model.config == vae.model.config and torch.equal(again.model.vae_scale, state[SCALE])


@pytest.mark.parametrize("channels", [16, 32, 48])
def test_a_file_without_such_a_name_is_refused(channels, tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file(as_published(wan_like(channels, 1 if channels == 16 else 2)), path)
    with pytest.raises(CheckpointError, match=r"mine\.safetensors: the scale of its latents is not in the file"):
        load(path, device="cpu")


def test_cogvideoxs_is_refused_by_name(tmp_path):
    save_file(as_published(wan_like(16, 1)), tmp_path / "taecvx.safetensors")
    with pytest.raises(CheckpointError, match=r"TAECVX\), which this pack does not run"):
        load(tmp_path / "taecvx.safetensors", device="cpu")


def test_latents_are_scaled_channel_by_channel(noise):
    tensors = made("wan")
    plain, z = loaded(tensors), noise(1, 5, 3, 2, 3)
    scale, shift = torch.tensor([0.5, 1, 2, 4, 0.25]), torch.tensor([0.25, 0, -1, 0.5, 1])
    other = loaded(tensors | {SCALE: scale, SHIFT: shift})
    there = z / scale.view(-1, 1, 1, 1) + shift.view(-1, 1, 1, 1)
    close(other.decode(there), plain.decode(z), 1e-5)
    video = plain.decode(z)
    close(other.encode(video), plain.encode(video) / scale.view(-1, 1, 1, 1) + shift.view(-1, 1, 1, 1), 1e-6)


def test_weights_of_two_frames_where_a_latent_is_one(noise):
    """Files may hold them at the first level; the last frame's count."""
    tensors = made("wan")
    more = torch.cat((torch.randn(DECODER[-1], DECODER[-1], 1, 1), tensors["decoder.7.conv.weight"].float()))
    z = noise(1, 5, 3, 2, 3)
    assert torch.equal(loaded(tensors | {"decoder.7.conv.weight": more}).decode(z), loaded(tensors).decode(z))


def test_a_leaky_relu_keeps_a_part(noise):
    tensors = made("light")
    z = noise(1, 6, 2, 2, 3)
    none = loaded(tensors | {LEAK: torch.tensor(0.0)}).decode(z, range="signed")
    # Without it pixels are in 0..1.
    plain = loaded({n: t for n, t in tensors.items() if n != LEAK}).decode(z, range="signed")
    close(none * 2 - 1, plain, 1e-6)
    assert not torch.equal(none, loaded(tensors).decode(z, range="signed"))


def test_an_encoder_alone_is_known(tmp_path):
    tensors = {n: t for n, t in as_published(made("wan2.2")).items() if n.startswith("encoder.")}
    tensors |= {SCALE: torch.ones(6), SHIFT: torch.zeros(6)}
    architecture, config = encoder_only(Checkpoint(tensors, {}, tmp_path / "encoder.safetensors"))
    assert (architecture.name, architecture.spatial, config.decoder_widths) == ("taehv", 16, None)


@pytest.mark.parametrize(("name", "shape"), [
    ("decoder.22.bias", (5,)), ("encoder.0.weight", (8, 12, 3, 3)), ("encoder.7.conv.weight", (12, 12, 1, 1)),
    ("decoder.13.conv.weight", (48, 16, 1, 1)),
])  # fmt: skip
def test_other_sizes_are_refused(name, shape):
    tensors = made("wan") | {name: torch.zeros(shape)}
    with pytest.raises(CheckpointError):
        loaded(tensors)

