"""pipe.vae = for_diffusers(pipe.vae): pipelines and VAEs of diffusers give what their own VAE gave."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import InputError, load
from zerowaste_vae.engine.precision.digest import of_network

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (pip install diffusers transformers)")
pytest.importorskip("transformers", reason="transformers is not installed (pip install diffusers transformers)")

from zerowaste_vae.adapters import for_diffusers  # noqa: E402

WAN = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
       "temperal_downsample": [False, True, True]}  # fmt: skip
LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "layers_per_block": 2}
KL = {**LEVELS, "up_block_types": ("UpDecoderBlock2D",) * 4}
FLUX = {**KL, "block_out_channels": (16, 16, 32, 32), "norm_num_groups": 8, "latent_channels": 16,
        "use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1159,
        "scaling_factor": 0.3611}  # fmt: skip
FLUX2 = {**KL, "block_out_channels": (32,) * 4, "norm_num_groups": 8, "latent_channels": 32}
SVD = {**LEVELS, "block_out_channels": (32,) * 4, "latent_channels": 4}
HUNYUAN = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 2, "norm_num_groups": 4, "latent_channels": 16}
#: Class, sizes and the shape of a latent.
VAES = {
    "wan": ("AutoencoderKLWan", WAN, (1, 16, 2, 4, 6)),
    "qwen": ("AutoencoderKLQwenImage", WAN, (1, 16, 1, 4, 6)),
    "flux": ("AutoencoderKL", FLUX, (2, 16, 4, 6)),
    "sd": ("AutoencoderKL", {**FLUX, "latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True},
           (1, 4, 4, 6)),
    "flux2": ("AutoencoderKLFlux2", FLUX2, (1, 32, 4, 6)),
    "svd": ("AutoencoderKLTemporalDecoder", SVD, (3, 4, 4, 6)),
    "hunyuan": ("AutoencoderKLHunyuanVideo", HUNYUAN, (1, 16, 3, 4, 6)),
    "cogvideox": ("AutoencoderKLCogVideoX", HUNYUAN, (1, 16, 3, 4, 6)),
}  # fmt: skip
STILL = ("flux", "sd", "flux2", "svd")


@pytest.fixture
def make(seed_model):
    def made(name):
        kind, sizes, shape = VAES[name]
        if not hasattr(diffusers, kind):
            pytest.skip(f"this diffusers has no {kind}")
        vae = getattr(diffusers, kind)(**sizes).eval()
        seed_model(vae, 4)
        if name == "flux2":
            g = torch.Generator().manual_seed(1)
            vae.bn.running_mean.normal_(generator=g)
            vae.bn.running_var.uniform_(0.5, 2, generator=g)
        return vae, shape

    return made


@pytest.mark.parametrize("name", VAES)
def test_decode_and_encode(make, name, noise):
    theirs, shape = make(name)
    ours, z = for_diffusers(theirs), noise(*shape)
    clip = {"num_frames": shape[0]} if name == "svd" else {}
    x = noise(1, 3, *(() if name in STILL else (1 if name == "qwen" else 5,)), 32, 48)
    with torch.no_grad():
        frames, found = theirs.decode(z, **clip).sample, theirs.encode(x).latent_dist
    made = ours.decode(z, **clip)
    assert made.sample.shape == frames.shape
    assert made.sample.sub(frames).abs().max() < 4e-5 * frames.std()
    assert torch.equal(ours.decode(z, return_dict=False, **clip)[0], made.sample)
    mine = ours.encode(x).latent_dist
    for part in ("mean", "logvar", "std", "var", "parameters"):
        wanted = getattr(found, part)
        assert getattr(mine, part).sub(wanted).abs().max() < 4e-5 * wanted.std()
    draw = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert mine.sample(draw[0]).sub(found.sample(draw[1])).abs().max() < 4e-5 * found.mean.std()
    assert torch.equal(ours.encode(x, return_dict=False)[0].mode(), mine.mean)


def wan(vae):
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    pipe = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )  # fmt: skip
    return pipe, "frames", {"num_frames": 5, "negative_prompt_embeds": torch.zeros(1, 8, 32)}


def qwen(vae):
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    pipe = diffusers.QwenImagePipeline(
        tokenizer=None, text_encoder=None, transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return pipe, "images", {"prompt_embeds_mask": torch.ones(1, 8, dtype=torch.long), "true_cfg_scale": 1.0}


def flux(vae):
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    pipe = diffusers.FluxPipeline(
        tokenizer=None, text_encoder=None, tokenizer_2=None, text_encoder_2=None, transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return pipe, "images", {"pooled_prompt_embeds": torch.zeros(1, 32)}


@pytest.mark.parametrize("family", [wan, qwen, flux])
def test_a_pipeline(make, family, noise):
    """Text is left out: its embeddings are given."""
    torch.manual_seed(0)  # of the transformer's weights
    pipe, result, options = family(make(family.__name__)[0])
    pipe.set_progress_bar_config(disable=True)
    prompt = noise(1, 8, 32)

    def run():
        made = pipe(
            prompt_embeds=prompt, height=32, width=48, num_inference_steps=2, output_type="pt",
            generator=torch.Generator().manual_seed(2), **options,
        )  # fmt: skip
        return getattr(made, result)

    wanted = run()
    pipe.vae = for_diffusers(pipe.vae)
    made = run()
    assert made.shape == wanted.shape and wanted.std() > 0.01
    assert made.sub(wanted).abs().max() < 1e-4


def test_a_folder_and_a_file_beside_its_configuration(make, noise, tmp_path):
    theirs, shape = make("flux")
    z = noise(*shape)
    wanted = for_diffusers(theirs).decode(z).sample
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    config = {**{k: v for k, v in theirs.config.items() if k != "norm_num_groups"}, "norm_num_groups": 8,
              "_class_name": "AutoencoderKL"}  # fmt: skip
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        with pytest.raises(InputError, match=r"config\.json.*needs the VAE's configuration"):
            for_diffusers(path)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    for path in (tmp_path, str(tmp_path / "weights.safetensors")):
        ours = for_diffusers(path, device="cpu", dtype=torch.float32)
        assert torch.equal(ours.decode(z).sample, wanted)
        assert ours.config.scaling_factor == 0.3611 and "shift_factor" in ours.config
    save_file(theirs.state_dict(), tmp_path / "second.safetensors")
    with pytest.raises(InputError, match=r"holds 2 \.safetensors files"):
        for_diffusers(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="is no configuration: it holds list"):
        for_diffusers(tmp_path)


def test_what_pipelines_ask_of_it(make, noise, caplog, monkeypatch):
    theirs, shape = make("qwen")
    ours = for_diffusers(theirs.to(torch.bfloat16), vram_gb=1)
    assert ours.config is theirs.config and ours.temperal_downsample == [False, True, True]
    assert (ours.dtype, ours.device.type) == (torch.bfloat16, "cpu")
    z = noise(*shape).to(torch.bfloat16)
    brief, exact = ours.decode(z).sample, ours.decode(z.float()).sample
    assert brief.dtype == torch.bfloat16 and brief.sub(exact).abs().max() <= 2**-8 * exact.abs().max()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ours.nothing
    with caplog.at_level("INFO"):
        ours.enable_tiling(tile_sample_min_height=64)
    assert "tiling and slicing are not used" in caplog.text and not ours.use_tiling
    turns = []
    ours._hf_hook = type("Hook", (), {"pre_forward": lambda self, module: turns.append(module)})()
    ours.decode(noise(*shape))
    assert turns == [ours], "offloading hears that its turn has come"
    with pytest.raises(InputError, match="cannot be trained"):
        ours(noise(*shape))


def test_families_that_it_does_not_stand_in_for(make, monkeypatch):
    monkeypatch.setattr(sys.modules["zerowaste_vae.engine.extras.adapters.for_diffusers"], "FAMILIES", ("sd",))
    with pytest.raises(InputError, match="this VAE: for_diffusers does not stand in for cogvideox"):
        for_diffusers(make("cogvideox")[0])


@pytest.mark.parametrize("latents", [1, 2, 5])
def test_batches_of_a_clip(make, noise, latents):
    """Two latents each; an odd one goes with the first two. Any chunk gives the same bits."""
    theirs, _ = make("cogvideox")
    ours, z, x = for_diffusers(theirs), noise(1, 16, latents, 2, 4), noise(1, 3, 4 * latents - 3, 16, 32)
    with torch.no_grad():
        frames, found = theirs.decode(z).sample, theirs.encode(x).latent_dist.parameters
    made, mine = ours.decode(z).sample, ours.encode(x).latent_dist.parameters
    assert made.shape == frames.shape and made.sub(frames).abs().max() < 4e-5 * frames.std()
    assert mine.shape == found.shape and mine.sub(found).abs().max() < 4e-5 * found.std()
    one = for_diffusers(theirs, chunk=1)
    assert torch.equal(one.decode(z).sample, made) and torch.equal(one.encode(x).latent_dist.parameters, mine)


@pytest.mark.parametrize("name", ["hunyuan", "cogvideox"])
def test_frames_that_fill_no_latent_are_refused(make, noise, name):
    """Norms see them in diffusers."""
    with pytest.raises(InputError, match=r"8 frames do not fill latents: .* takes 4n \+ 1 here"):
        for_diffusers(make(name)[0]).encode(noise(1, 3, 8, 16, 16))


@pytest.mark.parametrize(("latents", "settings"), [
    (6, {}), (6, {"use_framewise_decoding": False, "use_framewise_encoding": False}),
    (4, {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4}), (5, {}),
])  # fmt: skip
def test_pieces_of_long_clips(make, noise, latents, settings):
    """Diffusers blends pieces along time from 17 frames on, unless its VAE was told otherwise."""
    theirs, _ = make("hunyuan")
    for name, to in settings.items():
        setattr(theirs, name, to)
    ours, z, x = for_diffusers(theirs), noise(1, 16, latents, 2, 4), noise(1, 3, 4 * latents - 3, 16, 32)
    with torch.no_grad():
        frames, found = theirs.decode(z).sample, theirs.encode(x).latent_dist.parameters
    made, mine = ours.decode(z).sample, ours.encode(x).latent_dist.parameters
    assert made.shape == frames.shape and made.sub(frames).abs().max() < 4e-5 * frames.std()
    assert mine.shape == found.shape and mine.sub(found).abs().max() < 4e-5 * found.std()


def test_pieces_of_no_whole_latents_are_refused(make, noise):
    """Their frames would be other ones in silence, and too few or too many."""
    theirs, _ = make("hunyuan")
    theirs.tile_sample_min_num_frames = 18
    ours = for_diffusers(theirs)
    for call, given in ((ours.decode, noise(1, 16, 6, 2, 4)), (ours.encode, noise(1, 3, 21, 16, 32))):
        with pytest.raises(InputError, match=r"tile_sample_min_num_frames=18: .*; give a multiple of 4"):
            call(given)


@pytest.mark.parametrize(("name", "why"), [
    ("hunyuan", "it has attention to earlier frames of a clip, which only plain torch does"),
    ("cogvideox", "its norms span batches of a clip, which only plain torch does"),
])  # fmt: skip
def test_comfyuis_numbers_stay_the_default(make, noise, name, why):
    """Both of one module's weights, in turns: no plan and no packed weight of one is used by the other."""
    theirs, shape = make(name)
    z = noise(*shape)
    with torch.no_grad():
        wanted = theirs.decode(z).sample
    usual, ours = load(theirs, device="cpu"), for_diffusers(theirs)
    for _ in range(2):
        assert usual.decode_raw(z).sub(wanted).abs().max() > 0.1 * wanted.std()
        assert ours.decode(z).sample.sub(wanted).abs().max() < 4e-5 * wanted.std()
    assert usual.model.config != ours.vae.model.config
    assert len({of_network(vae.model, vae.arch) for vae in (usual, ours.vae)}) == 2
    peaks = [vae.planner.plan("decoder", (6, 32, 48)).peak_bytes for vae in (ours.vae, usual)]
    assert peaks[0] > peaks[1], "all frames wait for the clip's end"
    assert ours.vae.model.decoder.program.why_not_fused() == why and usual.model.decoder.program.why_not_fused() is None


def test_the_original_may_go(make, noise):
    """What pipelines read stays, its weights do not."""
    theirs, _ = make("flux2")
    mean = theirs.bn.running_mean.clone()
    ours = for_diffusers(theirs)
    assert torch.equal(ours.bn.running_mean, mean)
    assert list(ours.__dict__["_given"].state_dict()) == []
    assert theirs.decoder.conv_in.weight.numel(), "the caller's module is as it was"
