"""A stamp of a network's weights notices changes, and lets harmless ones pass."""

import itertools

import pytest
import torch
from torch import nn
from zerowaste_vae.engine.network import stamp as stamps
from zerowaste_vae.engine.network.stamp import Stamp, spacing


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4),
                            nn.Linear(4, 4, bias=False))  # fmt: skip
    return network.requires_grad_(False)


def new_parameter(network):
    network[2][0].weight = nn.Parameter(network[2][0].weight.clone(), requires_grad=False)


def another_at_the_same_place(network):
    """As an allocator gives memory again that has just become free."""
    layer = network[2][0]
    values = layer.weight.data
    del layer.weight
    values.mul_(2)
    layer.weight = nn.Parameter(values, requires_grad=False)


def in_place(network):
    network[0].bias[1] += 1e-3


def loaded(network):
    network.load_state_dict(network.state_dict())


def assigned(network):
    network[2][0].weight.data = 2 * network[2][0].weight.data


def layer(network):
    network[1] = nn.GroupNorm(4, 4)


def without_a_layer(network):
    del network[1]


def taken_away(network):
    network[0].bias = None


def added(network):
    """As a LoRA with an offset for a layer that has none."""
    network[4].bias = nn.Parameter(torch.ones(4), requires_grad=False)


def buffer(network):
    network[3].running_mean += 1


def uncounted(network):
    """As a script does that goes around torch's count of writes."""
    network[0].weight.data[1, 1, 2, 2, 2] += 1e-3


CHANGES = [uncounted, new_parameter, another_at_the_same_place, in_place, loaded, assigned, layer, without_a_layer,
           taken_away, added, buffer]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(network, change):
    stamp = Stamp(network)
    assert stamp.holds(network) and stamp.holds(network, "decoder")
    change(network)
    assert not stamp.holds(network) and not stamp.holds(network)
    assert Stamp(network).holds(network)


@pytest.mark.parametrize("change", [uncounted, new_parameter, another_at_the_same_place, assigned, layer, buffer])
def test_changes_in_inference_mode_are_noticed(change):
    """Tensors made there do not count what is written to them."""
    with torch.inference_mode():
        network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.Sequential(nn.Linear(4, 4)),
                                nn.BatchNorm1d(4)).requires_grad_(False)  # fmt: skip
        stamp = Stamp(network)
        assert stamp.holds(network)
        change(network)
        assert not stamp.holds(network)
        stamp = Stamp(network)
        network[0].weight.mul_(2)
        assert not stamp.holds(network)


def test_moved_in_inference_mode(network):
    """As a host moves weights, which torch then no longer counts writes to."""
    stamp = Stamp(network)
    with torch.inference_mode():
        for tensor in network.parameters():
            tensor.data = tensor.data.clone()
        assert stamp.holds(network) and stamp.holds(network)
        network[0].weight.mul_(2)
        assert not stamp.holds(network)


def test_values_of_every_size(network):
    """A change is seen at the ends of a long axis too, whatever the layout; tensors without values are no trouble."""
    wide = nn.Conv2d(40, 33, 3, bias=False).requires_grad_(False)
    wide.none, wide.one = nn.Parameter(torch.empty(0), False), nn.Parameter(torch.ones(()), False)
    for change in (lambda: wide.weight.data[16:].neg_(), lambda: wide.weight.data[:, :20].mul_(2),
                   lambda: wide.one.data.add_(1)):  # fmt: skip
        stamp = Stamp(wide)
        wide.to(memory_format=torch.channels_last)
        assert stamp.holds(wide)
        wide.to(memory_format=torch.contiguous_format)
        assert stamp.holds(wide)
        change()
        assert not stamp.holds(wide)


def test_a_network_that_was_moved_is_the_same(network):
    """Elsewhere in memory, and laid out otherwise, with the same values."""
    stamp = Stamp(network)
    for layer in network.modules():
        if isinstance(layer, nn.Conv3d):
            layer.to(memory_format=torch.channels_last_3d)
        for tensor in layer.parameters(recurse=False):
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    assert stamp.holds(network) and stamp.holds(network)
    with torch.no_grad():
        network[0].weight.mul_(2)
    assert not stamp.holds(network)


def test_another_network_is_another(network):
    stamp = Stamp(network)
    other = nn.Sequential(*network)
    assert not stamp.holds(other)


def test_nothing_is_kept_alive(network):
    stamp, parts = Stamp(network), list(network)
    del network
    assert stamp.holds(nn.Sequential(*parts)) is False


#: Shapes of large tensors in the networks: convolutions of more outputs than inputs and of fewer, products, patches.
LARGE = [(96, 64, 3, 3, 3), (64, 96, 3, 3), (32, 512, 3, 3, 3), (768, 256), (128, 1024), (768, 3, 16, 16),
         (96, 64, 3, 1, 1)]  # fmt: skip


@pytest.fixture
def small_limits(monkeypatch):
    """Tensors of 40 KB count as large, those of 2 KB as no longer small."""
    monkeypatch.setattr(stamps, "WHOLE", 40_000)
    monkeypatch.setattr(stamps, "SMALL", 2_000)


def changed(tensor, place):
    """Whether a change of values at a place is seen, made as a host makes it whose writes torch does not count."""
    holder = nn.Module()
    holder.weight = nn.Parameter(tensor, requires_grad=False)
    stamp = Stamp(holder)
    assert stamp.holds(holder)
    tensor.data[place] += 0.25
    return not stamp.holds(holder)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", LARGE)
def test_no_channel_or_tap_of_a_large_tensor_is_missed(small_limits, noise, shape, kind):
    """Each output, each input, each tap alone, and all but one of each; also laid out with channels last."""
    tensor = noise(*shape).to(kind)
    layouts = [tensor]
    if len(shape) > 3:
        last = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
        layouts.append(tensor.clone(memory_format=last))
    for t in layouts:
        for axis, count in enumerate(shape):
            for index in {0, 1, count // 3, count // 2, count - 2, count - 1} & set(range(count)):
                assert changed(t, (slice(None),) * axis + (index,)), (axis, index)
            assert count == 1 or changed(t, (slice(None),) * axis + (slice(1, None),)), axis
        for tap in itertools.product(*map(range, shape[2:])) if len(shape) > 2 else ():
            assert changed(t, (slice(None), slice(None), *tap)), tap


@pytest.mark.parametrize("shape", [*LARGE, (512, 512, 3, 3, 3), (8192, 2048), (384, 1536), (4096, 512, 1, 1, 1)])
def test_places_of_a_large_tensor(shape):
    """Every index of every axis has a place, every block of some channels too, and there are not many more places than
    channels."""
    apart, row = spacing(shape), torch.tensor(shape[1:]).prod().item()
    places = torch.arange(0, shape[0] * row - stamps.RUN + 1, apart)
    outputs, inputs = places // row, places % row // (row // shape[1])
    assert outputs.unique().numel() == shape[0] and len(places) <= 1.6 * max(shape[:2])
    runs = (places[:, None] + torch.arange(stamps.RUN)).flatten()
    taps = row // shape[1]
    assert (runs // taps % shape[1]).unique().numel() == shape[1] and (runs % taps).unique().numel() == taps
    block = 2 * round(shape[1] ** 0.5)
    for first in range(0, shape[0] - block, max(block // 2, shape[0] // 8)):
        seen = inputs[(outputs >= first) & (outputs < first + block)].sort().values
        assert torch.cat((seen[:1], seen.diff(), shape[1] - seen[-1:])).max() <= block


def test_all_of_a_smaller_tensor_is_compared(noise):
    """One value of many, an order of channels, and a tensor that begins anywhere in memory."""
    for values in (noise(99), noise(64, 256).half(), noise(3, 128, 3, 3, 3), noise(1 + 40_000)[1:].half()):
        for index in (0, values.numel() // 2, values.numel() - 1):
            assert changed(values, tuple(i.item() for i in torch.unravel_index(torch.tensor(index), values.shape)))
        holder = nn.Module()
        holder.weight = nn.Parameter(values, requires_grad=False)
        stamp = Stamp(holder)
        values.data.copy_(values.roll(4, -1))
        assert not stamp.holds(holder)


def test_each_half_by_itself(noise):
    """A run of one half does not wait for the other's values; those that belong to neither count for both."""
    network = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("encoder", "decoder", "statistics")})
    for changed_one, seen_by in (("encoder", {"encoder", ""}), ("decoder", {"decoder", ""}),
                                 ("statistics", {"encoder", "decoder", ""})):  # fmt: skip
        stamp = Stamp(network)
        network[changed_one].weight.data.neg_()
        assert {half for half in ("encoder", "decoder", "") if not stamp.holds(network, half)} == seen_by


def test_a_caller_under_autocast():
    """It joins tensors of one type, which torch refuses where that is not autocast's."""
    network = nn.Linear(4, 4).half()
    stamp = Stamp(network)
    with torch.autocast("cpu", torch.bfloat16):
        assert stamp.holds(network) and Stamp(network).holds(network)
