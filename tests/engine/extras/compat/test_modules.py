"""Gradients through the plain modules, with and without keeping activations; sampling; loading data."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zerowaste_vae.engine import compat, load
from zerowaste_vae.engine.families import seedvr2, wan
from zerowaste_vae.engine.network.ops.attention import FrameAttention
from zerowaste_vae.engine.network.ops.resnet import Resnet
from zerowaste_vae.engine.network.state import State
from zerowaste_vae.engine.options import DEFAULTS

MODELS = {
    "seedvr2": lambda: seedvr2.ARCHITECTURE.build(seedvr2.Config((4, 8, 8, 8), (4, 8, 8, 8), 4, 2)),
    "wan21": lambda: wan.WAN21.build(wan.Config((4, 6, 8, 8), (6, 8, 8, 8))),
    "wan22": lambda: wan.WAN21.build(wan.Config((4, 8, 8, 8), (4, 8, 8, 8), 48, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_gradients(name, seed_model, noise):
    plain = MODELS[name]()
    seed_model(plain, 1)
    saving = copy.deepcopy(plain)
    blocks = sum(isinstance(m, (Resnet, FrameAttention)) for m in plain.modules())
    assert compat.checkpoint_blocks(saving) == blocks
    assert compat.checkpoint_blocks(saving) == 0
    z = noise(1, plain.config.latent_channels, 2, 2, 2)
    for model in (plain, saving):
        model.decoder(z).square().mean().backward()
    grads = {k: p.grad for k, p in plain.named_parameters() if k.startswith("decoder.")}
    assert len(grads) > 50 and all(g.abs().sum() > 0 for g in grads.values())
    for key, p in saving.named_parameters():
        if key in grads:
            torch.testing.assert_close(p.grad, grads[key], rtol=0, atol=0)


def test_gradients_are_right(seed_model, noise):
    """Against finite differences in fp64, through both halves."""
    model = MODELS["seedvr2"]().double()
    seed_model(model, 2)
    weight, x = model.decoder.conv_in.weight, noise(1, 3, 5, 8, 8).double()

    def loss():
        mean, logvar = model.encoder(x).chunk(2, 1)
        return model.decoder(mean + 0 * logvar).square().mean()

    loss().backward()
    direction = noise(*weight.shape, seed=1).double()
    with torch.no_grad():
        weight.add_(1e-5 * direction)
        up = loss()
        weight.sub_(2e-5 * direction)
        down = loss()
    assert (weight.grad * direction).sum().item() == pytest.approx(((up - down) / 2e-5).item(), rel=1e-5)


def test_activations_are_not_kept(seed_model, noise):
    def saved(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model.decoder(noise(1, 4, 2, 4, 4))
        return total

    plain = MODELS["seedvr2"]()
    seed_model(plain, 3)
    saving = copy.deepcopy(plain)
    compat.checkpoint_blocks(saving)
    assert saved(saving) < 0.5 * saved(plain)


def test_blocks_with_history_run_as_they_are(seed_model, noise):
    model = MODELS["seedvr2"]()
    seed_model(model, 4)
    z = noise(1, 4, 3, 2, 2)
    expected = model.decoder(z)
    compat.checkpoint_blocks(model)
    state = State()
    parts = [model.decoder(part, state) for part in z.split(1, 2)]
    torch.testing.assert_close(torch.cat(parts, 2), expected, rtol=0, atol=1.5e-5)
    torch.cat(parts, 2).sum().backward()


def test_checkpointed_copy(seed_model, noise):
    model = MODELS["seedvr2"]()
    seed_model(model, 5)
    compat.checkpoint_blocks(model)
    z = noise(1, 4, 1, 2, 2)
    other, before = copy.deepcopy(model), model.decoder(z)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert not torch.equal(other.decoder(z), before)
    assert torch.equal(model.decoder(z), before)


def test_a_training_step_shows_in_decode(vae_file, noise):
    source = load(vae_file, precision="bf16", device="cpu")
    vae = compat.optimize_vae_for_training(source, "cpu")
    assert (vae.precision, vae.dtype) == ("fp32", torch.float32) and vae.options == DEFAULTS.switched(
        off=["triton_fusion"]
    )
    z = noise(1, 16, 2, 2, 2)
    before, kept = vae.decode(z), source.decode(z)
    optimizer = torch.optim.SGD(vae.model.decoder.parameters(), lr=0.1)
    with compat.configure_amp_context(dtype=torch.bfloat16):
        loss = vae.model.decoder(z).float().square().mean()
    loss.backward()
    optimizer.step()
    after = vae.decode(z)
    assert not torch.equal(after, before) and not after.requires_grad
    assert torch.equal(source.decode(z), kept)
    assert not any(p.requires_grad for p in source.model.parameters())


def test_other_modules_train_too():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x, scale=1.0):
            return self.conv(x) * scale

    class BigBlock(nn.Sequential):
        pass

    module = BigBlock(Block(), Block())
    for p in module.parameters():
        p.requires_grad_(False)
    assert compat.optimize_vae_for_training(module, "cpu") is module
    assert module.training and "forward" in vars(module[0]) and "forward" not in vars(module)
    module(torch.ones(1, 2, 2, 3, 3)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_reparameterize():
    mean, logvar = torch.full((4, 50_000), 3.0, requires_grad=True), torch.full((4, 50_000), -2.0, requires_grad=True)
    sample = compat.reparameterize(mean, logvar, torch.Generator().manual_seed(0))
    assert sample.mean().item() == pytest.approx(3.0, abs=0.01)
    assert sample.std().item() == pytest.approx(torch.tensor(-1.0).exp().item(), abs=0.01)
    sample.sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones_like(mean))
    torch.testing.assert_close(logvar.grad, 0.5 * (sample - mean).detach(), rtol=1e-4, atol=1e-5)
    again = compat.reparameterize(mean, logvar, torch.Generator().manual_seed(0))
    assert torch.equal(again, sample)
    extreme = compat.reparameterize(torch.zeros(2), torch.tensor([1e9, -1e9]))
    assert torch.isfinite(extreme).all()


def test_reparameterize_is_the_networks_own(vae, noise):
    moments = noise(1, 32, 2, 3, 3)
    ours = compat.reparameterize(*moments.chunk(2, 1), torch.Generator().manual_seed(7))
    assert torch.equal(ours, vae.model.sample(moments, 7))


# -- data -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def frames():
    return TensorDataset(torch.arange(10.0))


def test_loader_gives_every_item(frames):
    loader = compat.create_optimized_dataloader(frames, 4, False, 0, False)
    assert torch.equal(torch.cat([x for (x,) in loader]), torch.arange(10.0))
    assert not loader.persistent_workers


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_workers(frames, monkeypatch, caplog):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert compat.create_optimized_dataloader(frames).num_workers == 0
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    chosen = compat.create_optimized_dataloader(frames)
    assert (chosen.num_workers, chosen.persistent_workers) == (2, True)
    assert compat.create_optimized_dataloader(frames, num_workers=6).num_workers == 6
    monkeypatch.setattr(sys, "platform", "win32")
    assert compat.create_optimized_dataloader(frames, num_workers=6).num_workers == 2
    assert "num_workers=6" in caplog.text


def test_loader_pins_only_for_a_gpu(frames, monkeypatch, caplog):
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert compat.create_optimized_dataloader(frames, num_workers=0).pin_memory is gpu
        assert compat.create_optimized_dataloader(frames, num_workers=0, pin_memory=True).pin_memory is gpu
    assert caplog.text.count("pin_memory is off") == 1
