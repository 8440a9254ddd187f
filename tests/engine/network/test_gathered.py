"""Packed weights in one block of memory: the same values, laid out alike, and none of what they were packed from."""

import pytest
import torch
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.network.gathered import gathered, tensors_of
from zerowaste_vae.engine.planning.fusable import half_not_fused, no_8_bit
from zerowaste_vae.engine.precision.modes import PRECISIONS
from zerowaste_vae.engine.vae import VideoVAE

from ..execution.test_last_stages import CONFIGS

CPU = torch.device("cpu")


def cases():
    for architecture in ARCHITECTURES:
        programs, native = architecture.programs(CONFIGS[architecture.name]), PRECISIONS[architecture.native]
        if not all(half_not_fused(program, native) for program in programs):
            for precision in (architecture.native, *(() if no_8_bit(programs, native) else ("int8",))):
                yield pytest.param(architecture, precision, id=f"{architecture.name}-{precision}")


@pytest.fixture
def make(monkeypatch, seed_model):
    """(architecture, precision) -> a small VAE of it in the fused walk, on a CPU."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)

    def made(architecture, precision):
        model = architecture.build(CONFIGS[architecture.name]).requires_grad_(False)
        seed_model(model, 3)
        kind = architecture.native
        here = architecture.of(model.config), kind, PRECISIONS[kind], CPU
        return VideoVAE(model.to(PRECISIONS[kind]), *here, asked=precision)

    return made


def decoded(vae):
    return vae.decode(torch.randn(1, vae.latent_channels, 1, 1, 2, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("room", [None, 0], ids=["at-once", "by-way-of-the-host"])
@pytest.mark.parametrize(("architecture", "precision"), list(cases()))
def test_one_block(make, architecture, precision, room):
    """One block of memory holds all packed tensors."""
    vae = make(architecture, precision)
    expected = decoded(vae)
    if not vae._fused.packed_bytes("decoder"):
        pytest.skip("its decoder runs as plain torch")
    expected, before = decoded(vae), vae._fused.decoder()
    own = {p.untyped_storage().data_ptr() for p in vae.model.decoder.parameters()}
    after = gathered(lambda: before, vae.model.decoder.parameters(), CPU, room)
    storages = set()
    for (name, old), new in zip(tensors_of(before).items(), tensors_of(after).values(), strict=True):
        assert torch.equal(old.flatten().view(torch.uint8), new.flatten().view(torch.uint8)), name
        assert old.stride() == new.stride(), name
        at = new.untyped_storage().data_ptr()
        if at in own:
            assert new is old, name
        else:
            storages.add(at)
            assert new.data_ptr() % 256 == at % 256, name
    assert len(storages) == 1
    assert after.nbytes == before.nbytes
    vae._fused._packed["decoder"] = after
    vae._fused.runs.forget()
    assert torch.equal(decoded(vae), expected)


def test_borrowed(make):
    """Norms, biases and projections that are parameters as they are lie in the block, too."""
    vae = make(ARCHITECTURES[0], ARCHITECTURES[0].native)
    decoded(vae)
    packed = vae._fused.decoder()
    own = {p.untyped_storage().data_ptr() for p in vae.model.decoder.parameters()}
    assert own & {t.untyped_storage().data_ptr() for t in tensors_of(packed).values()}
    after = gathered(lambda: packed, (), CPU)
    assert len({t.untyped_storage().data_ptr() for t in tensors_of(after).values()}) == 1
    for old, new in zip(tensors_of(packed).values(), tensors_of(after).values(), strict=True):
        assert torch.equal(old.flatten().view(torch.uint8), new.flatten().view(torch.uint8))
        assert old.stride() == new.stride()


def test_through_host(make, monkeypatch):
    """Nothing is left of the copies that the first block was to hold."""
    vae = make(ARCHITECTURES[0], ARCHITECTURES[0].native)
    decoded(vae)
    packed, asked, empty = vae._fused.decoder(), [], torch.empty

    def full_at_first(*args, **options):
        asked.append(options["device"])
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", full_at_first)
    after = gathered(lambda: packed, vae.model.decoder.parameters(), CPU)
    assert len(asked) == 3
    for old, new in zip(tensors_of(packed).values(), tensors_of(after).values(), strict=True):
        assert torch.equal(old.flatten().view(torch.uint8), new.flatten().view(torch.uint8))
