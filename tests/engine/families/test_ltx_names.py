"""LTX-Video and LTX-2 under diffusers' names: the layouts of every version, by the tables of the published conversions,
and the description in the folder of the file."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import CheckpointError, load
from zerowaste_vae.engine.families.ltx import ARCHITECTURE, STRIDES, Block, Config

from .originals import close

#: Blocks of each half, original number -> diffusers' place.
UP_090 = ("mid_block", "up_blocks.0", "up_blocks.1.upsamplers.0", "up_blocks.1", "up_blocks.2.conv_in",
          "up_blocks.2.upsamplers.0", "up_blocks.2", "up_blocks.3.conv_in", "up_blocks.3.upsamplers.0",
          "up_blocks.3")  # fmt: skip
DOWN_090 = ("down_blocks.0", "down_blocks.0.downsamplers.0", "down_blocks.0.conv_out", "down_blocks.1",
            "down_blocks.1.downsamplers.0", "down_blocks.1.conv_out", "down_blocks.2", "down_blocks.2.downsamplers.0",
            "down_blocks.3", "mid_block")  # fmt: skip
UP = ("mid_block", *(f"up_blocks.{i}{part}" for i in range(4) for part in (".upsamplers.0", "")))
DOWN = (*(f"down_blocks.{i}{part}" for i in range(4) for part in ("", ".downsamplers.0")), "mid_block")
ALL, TIME, SPACE = (STRIDES[kind] for kind in ("all", "time", "space"))
OLD = Config(
    (Block(8, 1), Block(8, stride=ALL), Block(16), Block(16, 1), Block(16, stride=ALL), Block(24), Block(24, 1),
     Block(24, stride=ALL), Block(24, 1), Block(24, 1)),
    (Block(24, 2), Block(24, 1), Block(24, stride=ALL), Block(24, 1), Block(16), Block(16, stride=ALL), Block(16, 1),
     Block(8), Block(8, stride=ALL), Block(8, 1)),
    8, 24, 16,
)  # fmt: skip
DOWNS = (Block(8, 1), Block(16, stride=SPACE, shortcut=True), Block(16, 1), Block(32, stride=TIME, shortcut=True),
         Block(32, 1), Block(64, stride=ALL, shortcut=True), Block(64, 1), Block(64, stride=ALL, shortcut=True),
         Block(64, 2))  # fmt: skip
TIMED = Config(
    DOWNS,
    (*(b for w in (32, 16, 8) for b in (Block(2 * w, 1, noisy=True), Block(w, stride=ALL, shortcut=True))),
     Block(8, 1)),
    8, 64, 16, timestep=0.05, noise=0.025,
)  # fmt: skip
NEW = Config(
    DOWNS, (Block(64, 1), Block(32, stride=ALL), Block(32, 2), Block(16, stride=ALL), Block(16, 1),
            Block(16, stride=TIME), Block(16, 1), Block(8, stride=SPACE), Block(8, 1)), 8, 64, 16,
    decoder_border="zero",
)  # fmt: skip
SAID = {"_class_name": "AutoencoderKLLTX2Video", "upsample_residual": [False] * 4, "decoder_causal": False,
        "decoder_spatio_temporal_scaling": [True] * 4, "encoder_spatial_padding_mode": "zeros",
        "decoder_spatial_padding_mode": "zeros"}  # fmt: skip
#: (sizes, tables, description)
VERSIONS = {
    "0.9.0": (OLD, (UP_090, DOWN_090), None), "0.9.1": (TIMED, (UP, DOWN), None), "2.3": (NEW, (UP, DOWN), SAID),
}  # fmt: skip


def to_diffusers(name: str, tables: tuple[tuple[str, ...], tuple[str, ...]], causal: bool) -> str:
    """causal: 1x1x1 convolutions are nested in a module, as in all versions before LTX-2."""
    if m := re.fullmatch(r"(en|de)coder\.(up|down)_blocks\.(\d+)\.(.*)", name):
        place = tables[m[2] == "down"][int(m[3])]
        rest = m[4].replace("res_blocks.", "resnets.").replace("norm3.norm.", "norm3.")
        name = f"{m[1]}coder.{place}.{rest}"
    if causal:
        name = name.replace(".conv_shortcut.", ".conv_shortcut.conv.")
    name = name.replace("last_time_embedder", "time_embedder").replace("last_scale_shift", "scale_shift")
    return {"per_channel_statistics.mean-of-means": "latents_mean",
            "per_channel_statistics.std-of-means": "latents_std"}.get(name, name)  # fmt: skip


def seeded(config, seed_model):
    model = ARCHITECTURE.build(config).requires_grad_(False)
    seed_model(model, 5)
    return model.state_dict()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version(version, seed_model, tmp_path, noise):
    config, tables, said = VERSIONS[version]
    native = seeded(config, seed_model)
    renamed = {to_diffusers(name, tables, version[0] == "0"): t for name, t in native.items()}
    assert len(renamed) == len(native) and "decoder.mid_block.resnets.0.conv1.conv.weight" in renamed
    save_file(renamed, tmp_path / "diffusion_pytorch_model.safetensors")
    if said:
        with pytest.raises(CheckpointError, match=r"config\.json beside it"):
            load(tmp_path / "diffusion_pytorch_model.safetensors", device="cpu")
        (tmp_path / "config.json").write_text(json.dumps(said))
    vae = load(tmp_path / "diffusion_pytorch_model.safetensors", device="cpu")
    assert vae.arch == "ltx" and vae.can_encode and vae.model.config == config
    loaded = vae.model.state_dict()
    assert loaded.keys() == native.keys() and all(torch.equal(loaded[name], t) for name, t in native.items())
    # In another order, with leftovers, and in a checkpoint.
    save_file({f"vae.{n}": renamed[n] for n in sorted(renamed)} | {"loss.logvar": torch.zeros(1)},
              tmp_path / "b.safetensors")  # fmt: skip
    z = noise(1, 16, 2, 2, 2)
    assert torch.equal(load(tmp_path / "b.safetensors", device="cpu").decode_raw(z), vae.decode_raw(z))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tensor_less(version, seed_model, tmp_path):
    config, tables, said = VERSIONS[version]
    renamed = {to_diffusers(n, tables, version[0] == "0"): t for n, t in seeded(config, seed_model).items()}
    (tmp_path / "config.json").write_text(json.dumps(said or {}))
    decoder = [name for name in renamed if not name.startswith("encoder.")]
    for gone in decoder[:: len(decoder) // 8]:
        save_file({n: t for n, t in renamed.items() if n != gone}, tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError):
            load(tmp_path / "a.safetensors", device="cpu")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"decoder_spatial_padding_mode": "circular"}, "circular"), ({"encoder_causal": False}, "looks ahead"),
        ({"patch_size_t": 2}, "longer than a frame"),
    ],
)  # fmt: skip
def test_other_networks_of_the_class(said, words, seed_model, tmp_path):
    renamed = {to_diffusers(n, (UP, DOWN), False): t for n, t in seeded(NEW, seed_model).items()}
    save_file(renamed, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SAID | said))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "a.safetensors", device="cpu")


@pytest.mark.parametrize("golden", ["ltx_v2", "ltx2_0"])
def test_the_recorded_weights_renamed(golden, shared, tmp_path):
    folder = shared / "golden" / "other"
    weights = load_file(folder / f"{golden}.weights.safetensors")
    save_file({to_diffusers(n, (UP, DOWN), True): t for n, t in weights.items()}, tmp_path / "a.safetensors")
    if golden == "ltx2_0":  # recorded with zeros at the borders
        (tmp_path / "config.json").write_text(json.dumps({
            "_class_name": "AutoencoderKLLTX2Video", "decoder_spatial_padding_mode": "zeros",
            "upsample_residual": [True] * 3,
        }))  # fmt: skip
    vae = load(tmp_path / "a.safetensors", device="cpu")
    assert vae.model.config.decoder_blocks == load(folder / f"{golden}.weights.safetensors",
                                                   device="cpu").model.config.decoder_blocks  # fmt: skip
    tensors = load_file(folder / f"{golden}.io.safetensors")
    close(vae.decode_raw(tensors["T2.latent"]), tensors["T2.decode"])
