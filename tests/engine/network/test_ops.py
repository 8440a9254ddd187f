"""Single modules against the recorded outputs of the original, in one call and streamed."""

import pytest
import torch
from zerowaste_vae.engine.network.ops.attention import SplitAttention
from zerowaste_vae.engine.network.ops.conv import ClipConv, FlatConv, FrameConv
from zerowaste_vae.engine.network.ops.down import Downsample
from zerowaste_vae.engine.network.ops.norm import Group
from zerowaste_vae.engine.network.ops.resnet import Resnet
from zerowaste_vae.engine.network.ops.shortcut import mean
from zerowaste_vae.engine.network.ops.up import Upsample
from zerowaste_vae.engine.network.state import State
from zerowaste_vae.engine.planning.dryrun import PeakMemory, peak_bytes

UNITS = {
    "conv333": (lambda: ClipConv(4, 5), [2, 1, 3]),
    "conv111": (lambda: ClipConv(4, 5, (1, 1, 1)), [2, 2]),
    "upsample_st": (lambda: Upsample(4, temporal=True), [2, 1, 1]),
    "upsample_s": (lambda: Upsample(4, temporal=False), [2, 1, 1]),
    "downsample_st": (lambda: Downsample(4, temporal=True), [5, 4]),
    "downsample_s": (lambda: Downsample(4, temporal=False), [3, 2]),
    "resnet_same": (lambda: Resnet(8, 8, Group(4)), [2, 1, 2]),
    "resnet_shortcut": (lambda: Resnet(8, 12, Group(4)), [2, 1, 2]),
}


def build(units, name):
    module = UNITS[name][0]()
    prefix = f"{name}.w."
    module.load_state_dict({k.removeprefix(prefix): v for k, v in units.items() if k.startswith(prefix)})
    for path, part in module.named_modules():
        if hasattr(part, "key"):
            part.key = path
    return module.requires_grad_(False)


@pytest.mark.parametrize("name", UNITS)
@torch.no_grad()
def test_unit_equals_original(units, name, atol):
    module, x = build(units, name), units[f"{name}.x"]
    torch.testing.assert_close(module(x), units[f"{name}.disabled"], rtol=0, atol=atol)
    state = State()
    parts = [module(part, state) for part in x.split(UNITS[name][1], 2)]
    torch.testing.assert_close(torch.cat(parts, 2), units[f"{name}.sliced"], rtol=0, atol=atol)


@torch.no_grad()
def test_attention_equals_original(units, atol):
    module = SplitAttention(8, Group(4))
    module.load_state_dict({k.removeprefix("attn.w."): v for k, v in units.items() if k.startswith("attn.w.")})
    x = units["attn.x_framebatch"].transpose(0, 1)[None]
    torch.testing.assert_close(module(x)[0].transpose(0, 1), units["attn.out"], rtol=0, atol=atol)


def test_gradients_flow_and_match_inference(units):
    module = build(units, "resnet_shortcut").requires_grad_(True)
    x = units["resnet_shortcut.x"].clone().requires_grad_(True)
    y = module(x)
    y.square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(module(x), y, rtol=0, atol=1e-6)


def test_state_is_the_callers(units):
    """Two clips may run through one module in turns; the module itself keeps nothing."""
    module, x = build(units, "conv333"), units["conv333.x"]
    a, b = State(), State()
    first = module(x[:, :, :2], a)
    module(torch.randn_like(x), b)
    rest = module(x[:, :, 2:], a)
    assert torch.equal(torch.cat((first, rest), 2), module(x))
    assert a.nbytes() == x[:, :, :2].numel() * 4


def test_history_does_not_pin_the_input(units):
    """A view would keep the whole extended input alive."""
    module, x, state = build(units, "conv333"), units["conv333.x"], State()
    module(x, state)
    history = state.histories[module.key]
    assert history.untyped_storage().nbytes() == history.numel() * history.element_size()


def test_means_of_some_frames_are_those_of_all(noise):
    """Sums in torch's own order depend on how many there are."""
    x = noise(1, 4, 8, 5, 4, 5)
    whole = mean(x, 2)
    torch.testing.assert_close(whole, x.mean(2))
    for first, end in ((0, 1), (1, 3), (4, 5)):
        assert torch.equal(mean(x[:, :, :, first:end].contiguous(), 2), whole[:, :, first:end])
    assert mean(x.half(), 2).dtype == torch.float16


@pytest.mark.parametrize("stride", [1, 2])
def test_the_operator_for_pictures(stride, noise):
    """It has the values of the one for clips, and where products compute it a dry run counts these."""
    how = {"padding": 1, "stride": stride, "bias": stride == 1}
    flat, clip = FlatConv(6, 4, 3, **how), FrameConv(6, 4, 3, **how)
    flat.load_state_dict(clip.state_dict())
    x = noise(2, 6, 3, 8, 10)
    with torch.no_grad():
        torch.testing.assert_close(flat(x), clip(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(flat(x[:1, :, 1:2]), clip(x)[:1, :, 1:2], rtol=0, atol=1e-5)
        flat, clip = flat.to("meta"), clip.to("meta")

        def counted(conv: FrameConv, products: bool) -> int:
            return peak_bytes(lambda: conv(torch.empty(1, 6, 1, 64, 64, device="meta")), PeakMemory(products))

        assert counted(flat, True) == pytest.approx(counted(clip, True), rel=0.01)
        assert counted(flat, True) != pytest.approx(counted(flat, False), rel=0.05)
