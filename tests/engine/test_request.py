"""Refuse wrong requests in one line that names the value."""

import math
import re

import pytest
import torch
from zerowaste_vae import InputError
from zerowaste_vae.engine import log
from zerowaste_vae.engine.extras.distributed.devices import resolve
from zerowaste_vae.engine.extras.media.latents import write_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png, write_png_folder
from zerowaste_vae.engine.request import Request, check_latent, check_out, check_part, check_seed, check_video

#: Tensors that hold no values side by side.
STRANGE = {
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tiling": "best"}, "tiling='best' is not one of auto, untiled, exact, blended"),
        ({"output": "int8"}, "output='int8' is not one of float32, float16, uint8"),
        ({"chunk": -2}, "chunk=-2 is below 0"),
        ({"vram_gb": -1.0}, "vram_gb=-1.0 is below 0"),
        ({"ram_gb": math.inf}, "ram_gb=inf is not a size"),
        ({"vram_gb": math.nan}, "vram_gb=nan is not a size"),
        ({"ram_gb": 1e308}, "ram_gb=1e+308 is not a size"),
        ({"vram_gb": "3"}, "vram_gb='3' is not a size"),
        ({"chunk": 1.5}, "chunk=1.5 is no whole number"),
        ({"chunk": True}, "chunk=True is no whole number"),
        ({"tile": "64"}, "tile='64' is no whole number"),
        ({"tile": -64}, "tile=-64 is below 0"),
        ({"overlap": -8}, "overlap=-8 is below 0"),
    ],
)
def test_what_no_vae_can_serve(values, says):
    with pytest.raises(InputError, match=re.escape(says)):
        Request(**values)


def test_seeds_have_64_bits():
    for seed in (None, 0, -(2**63), 2**64 - 1):
        check_seed(seed)
        assert seed is None or torch.Generator().manual_seed(seed)
    for seed in (-(2**63) - 1, 2**64, 10**30):
        with pytest.raises(InputError, match=f"seed={seed} is too large"):
            check_seed(seed)
    for seed in (1.5, "1", True):
        with pytest.raises(InputError, match=f"seed={seed!r} is no whole number"):
            check_seed(seed)


@pytest.mark.parametrize("values", [{"start": 1.5}, {"frames": "2"}, {"frames": 2.0}])
def test_parts_are_of_whole_frames(values):
    with pytest.raises(InputError, match="is no whole number"):
        check_part(**{"start": 0, "frames": None} | values, count=9)


@pytest.mark.parametrize("devices", [3, [], ()])
def test_devices_are_named(devices):
    with pytest.raises(InputError, match="devices names none"):
        resolve(devices, torch.device("cpu"))


def test_tiles():
    """Tiles are judged by the size of a latent pixel."""
    asked = Request("blended", 16, 8)
    asked.check(8)
    with pytest.raises(InputError, match="tile=16 is too small: use at least 32 pixels"):
        asked.check(16)
    with pytest.raises(InputError, match="overlap=16 must be smaller than tile=16"):
        Request("blended", 16, 16).check(8)
    Request("exact", 16, 16).check(8)  # bands share nothing
    Request("untiled", 3, 9).check(8)  # nobody asked for tiles


@pytest.mark.parametrize(("tiling", "tile", "said"), [
    ("auto", 32, True), ("untiled", 32, True), ("auto", 0, False), ("exact", 32, False), ("blended", 32, False),
])  # fmt: skip
def test_a_tile_that_has_no_effect_is_said(caplog, tiling, tile, said):
    log._said.clear()
    Request(tiling, tile, 8).check(8)
    assert (f"tile={tile} is not used with tiling {tiling}" in caplog.text) == said


def test_out():
    """Frames go into a tensor of their shape and type."""
    check_out(torch.empty(1, 5, 8, 8, 3), (1, 5, 8, 8, 3), Request().dtype)
    for out in (torch.empty(1, 5, 8, 9, 3), torch.empty(1, 5, 8, 8, 3, dtype=torch.float16)):
        with pytest.raises(InputError, match=r"the frames need torch\.float32 \[1, 5, 8, 8, 3\] on cpu"):
            check_out(out, (1, 5, 8, 8, 3), torch.float32)


@pytest.mark.parametrize("value", [torch.zeros(1, 16, 1, 2, 2).long(), torch.zeros(1, 16, 1, 2, 2) > 0])
def test_latents_are_tensors_of_floats(value):
    with pytest.raises(InputError, match="a latent is a tensor of floats, not"):
        check_latent(value, 16)


def test_latents_of_any_float_type_are_looked_at():
    for kind in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        z = torch.ones(1, 16, 1, 2, 2).to(kind)
        assert torch.equal(check_latent(z, 16).float(), z.float())
        with pytest.raises(InputError, match="NaN"):
            check_latent((z.float() * math.nan).to(kind), 16)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool, torch.complex64])
def test_whole_numbers_are_bytes(kind):
    """Others would be taken for floats in 0..1."""
    with pytest.raises(InputError, match=r"0\.\.1 or of bytes \(uint8\), not torch"):
        check_video(torch.ones(1, 1, 8, 8, 3).to(kind), 8)


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_meta_tensors(kind, vae, tmp_path):
    """Wherever a tensor comes in."""
    latent, video = (STRANGE[kind](torch.zeros(shape)) for shape in ((1, 16, 1, 2, 2), (1, 1, 16, 16, 3)))
    frame = STRANGE[kind](torch.zeros(16, 16, 3))
    calls = {
        "decode": lambda: vae.decode(latent),
        "stream": lambda: list(vae.stream(latent)),
        "decode_raw": lambda: vae.decode_raw(latent),
        "encode": lambda: vae.encode(video),
        "encode_stream": lambda: list(vae.encode_stream([video])),
        "encode_raw": lambda: vae.encode_raw(STRANGE[kind](torch.zeros(1, 3, 1, 16, 16))),
        "write_latent": lambda: write_latent(tmp_path / "l.safetensors", latent),
        "write_mp4": lambda: write_mp4(tmp_path / "a.mp4", [frame], 24),
        "write_png": lambda: write_png(tmp_path / "a.png", frame),
        "write_png_folder": lambda: write_png_folder(tmp_path / "a", [frame]),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=kind) as caught:
            call()
        assert "\n" not in str(caught.value), name
    assert not list(tmp_path.iterdir())


#: Of the values of frames -> what is said of them; None: nothing.
RANGES = {
    "bytes as floats": (lambda t: 255 * t, "frames reach 25"),
    "-1 to 1": (lambda t: 2 * t - 1, r"below -0\.1"),
    "normal": (lambda t: 6 * t - 3, "frames reach"),
    "one value above": (lambda t: t.index_fill(0, torch.tensor([0]), 2.1), "frames reach 2.1"),
    "sharpened": (lambda t: 1.4 * t - 0.09, None),
    "a few below": (lambda t: torch.where(t < 0.005, -0.5, t), None),
    "many below": (lambda t: torch.where(t < 0.03, -0.5, t), r"3 % of the frames' values are below -0\.1"),
    "at the limits": (lambda t: 2.1 * t.clamp(0, 1) - 0.1, None),
}


@pytest.mark.parametrize("case", RANGES)
def test_frame_range(case, vae, tmp_path):
    """Frames of another range are refused with the cure."""
    change, says = RANGES[case]
    video = change(torch.linspace(0, 1, 5 * 16 * 16 * 3)).reshape(5, 16, 16, 3)
    whole = lambda: torch.cat(list(vae.encode_stream([video])), 2)  # noqa: E731
    if says is None:
        assert torch.equal(vae.encode(video), vae.encode(video, any_range=True)) and whole().shape[2] == 2
        return
    calls = (lambda: vae.encode(video), whole, lambda: write_mp4(tmp_path / "a.mp4", video, 24),
             lambda: write_png_folder(tmp_path / "a", video))  # fmt: skip
    for call in calls:
        with pytest.raises(InputError, match=rf"{says}.*0\.\.1: (divide|give)|frames reach|below"):
            call()
    with pytest.raises(InputError, match=says):
        calls[0]()
    assert vae.encode(video, any_range=True).shape == (1, 16, 2, 2, 2)
    assert not list(tmp_path.iterdir())
