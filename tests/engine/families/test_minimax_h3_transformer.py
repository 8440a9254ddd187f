"""A transformer's walk: weights that come layer by layer, products in 8 bit, positions."""

from contextlib import nullcontext

import pytest
import torch
from zerowaste_vae.engine.families.minimax_h3 import ARCHITECTURE, Config
from zerowaste_vae.engine.families.minimax_h3.running import transformer
from zerowaste_vae.engine.families.minimax_h3.running.plans import layer_bytes
from zerowaste_vae.engine.families.minimax_h3.running.transformer import LayerWeights, TokenNetwork, tiles_together
from zerowaste_vae.engine.families.minimax_h3.tokens import turns
from zerowaste_vae.engine.kernels.targets import interpreted, triton_version
from zerowaste_vae.engine.network.offload import Hosted, moving_bytes, staying
from zerowaste_vae.engine.network.products import Product, product
from zerowaste_vae.engine.precision.modes import Mode, remembered, scaled_mode, why_no_products

CPU = torch.device("cpu")
LAYERS = 5


@pytest.fixture(scope="module")
def decoder(seed_model):
    model = ARCHITECTURE.build(Config(None, 64, LAYERS, 96)).requires_grad_(False)
    seed_model(model, 4)
    return model.decoder


class Stream:
    """Whose work is done at once."""

    def wait_event(self, event):
        assert event.recorded

    def wait_stream(self, stream):
        pass


class Event:
    recorded = False

    def record(self, stream):
        self.recorded = True


@pytest.mark.parametrize("resident", [0, 1, 3, 4, LAYERS])
@pytest.mark.parametrize("kind", [None, "fp8"])
def test_layers_come_in_order_whatever_stays(decoder, monkeypatch, resident, kind):
    """And what is being computed with is not overwritten."""
    network = TokenNetwork(decoder, torch.float32, CPU, kind, resident)
    network._copies = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    for _ in range(2):
        count = 0
        for own, layer in zip(network.layers, network.streamed(), strict=True):
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(own.tensors(), layer.tensors(), strict=True))
            assert (layer is own) == (count < resident)
            count += 1
        assert count == LAYERS
    assert network.nbytes == resident * network.layers[0].nbytes


@pytest.mark.parametrize("kind", [None, "fp8", "int8"])
def test_plans_know_a_layers_bytes(decoder, kind):
    network = TokenNetwork(decoder, torch.float16, CPU, kind)
    assert network.layers[0].nbytes == layer_bytes(network.step, torch.float16, kind)


@pytest.mark.parametrize("kind, bound", [("fp8", 0.04), ("int8", 0.008)])
def test_weights_have_a_scale_for_each_row(kind, bound, noise):
    linear = torch.nn.Linear(32, 16)
    linear.weight.data = noise(16, 32) * torch.logspace(-3, 3, 16)[:, None]
    before = linear.weight.detach().clone()
    packed = Product.of(linear, kind, torch.float32, CPU)
    assert torch.equal(linear.weight, before)
    error = (packed.weight.float() * packed.scales[:, None] - before).norm(dim=1) / before.norm(dim=1)
    assert error.max() < bound


def test_paired_products_gate_themselves(noise):
    """By weights whose first rows are the gates, as files have them."""
    linear, x = torch.nn.Linear(32, 48), torch.randint(-127, 128, (128, 32), dtype=torch.int8)
    plain = Product.of(linear, "int8", torch.float32, CPU)
    scales, sums = noise(128).abs() / 50, torch.empty(128 * 48, dtype=torch.int32)
    wide, made = torch.empty(128, 48), torch.empty(128, 24)
    product(plain, x, wide, scales, sums)
    product(plain.paired(), x, made, scales, sums)
    gate, value = wide.chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * value
    assert (made - expected).abs().max() <= 1e-6 * expected.abs().max()  # CPUs compute SiLU of neighbours otherwise


@pytest.mark.parametrize("kind, tiles, expected", [
    (None, 28, 4), ("fp8", 28, 4), ("int8", 28, 7), ("int8", 60, 7), (None, 9, 3), ("int8", 8, 4), ("int8", 1, 1),
])  # fmt: skip
def test_groups_have_equal_numbers_of_tiles(kind, tiles, expected):
    """As many as one product takes at most, of MiniMax H3's 1797 tokens each."""
    assert tiles_together(1797, tiles, torch.device("cuda"), kind) == expected
    assert tiles_together(1797, tiles, CPU, kind) == tiles_together(10**6, 1, torch.device("cuda"), kind) == 1


def test_what_stays_does_not_move():
    """But takes another type; where it would go is asked of an empty tensor."""
    model = ARCHITECTURE.build(Config(None, 64, 2, 96))
    assert all(p.dtype == torch.float16 for p in model.to(torch.float16).parameters())

    class There:
        """As a tensor on a GPU says where it is."""

        device, dtype = torch.device("cuda", 0), torch.bfloat16

    asked = []
    next(m for m in model.modules() if isinstance(m, Hosted))._apply(lambda t: asked.append(t.numel()) or There)
    assert set(asked) == {0}
    kept = [p for p in staying(model) if p.dtype == torch.bfloat16]
    assert len(kept) == 12 and all(p.device == CPU for p in kept)
    assert moving_bytes(model) + sum(p.nbytes for p in staying(model)) == sum(p.nbytes for p in model.parameters())
    assert len(staying(model)) == 2 * 12


def test_positions_are_the_middles_of_equal_parts():
    """The second of two frames, first of one row, third of four columns: 0.5, 0 and 0.25; the others are not turned."""
    table = turns(2, 1, 4, 64, 5, CPU)
    assert table.shape == (13, 2, 24) and torch.equal(table[8:], table[8:9].expand(5, -1, -1))
    frequencies = 100.0 ** -(torch.arange(8) / 8)
    angles = torch.cat([2 * torch.pi * place * frequencies for place in (0.5, 0.0, 0.25)])
    assert torch.allclose(table[6], torch.stack((angles.cos(), angles.sin())), atol=1e-6)
    assert torch.equal(table[8], torch.stack((torch.ones(24), torch.zeros(24))))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUBLAS_ALLOC_FAILED")])
def test_a_full_card_is_no_missing_product(monkeypatch, error):
    """A card is full while a VAE is loaded: that says nothing of its products, and the next question is asked there."""
    trouble, made = [error], {name: getattr(torch, name) for name in ("ones", "empty")}
    for name, make in made.items():
        monkeypatch.setattr(torch, name, lambda *size, device, make=make, **kind: make(*size, device=CPU, **kind))

    def product(*given, out):
        if trouble:
            raise trouble[0]
        return out

    monkeypatch.setattr(torch, "_int_mm", product)
    ask = remembered(why_no_products.__wrapped__)
    assert ask("int8", torch.device("cuda", 0)) is None
    trouble[:] = [RuntimeError("not implemented")]
    assert ask("int8", torch.device("cuda", 0)).endswith("no such products here: not implemented")
    trouble.clear()
    assert "not implemented" in ask("int8", torch.device("cuda", 0))  # that is an answer, and is kept
    assert ask("int8", torch.device("cuda", 1)) is None


def test_what_torch_lacks_is_said(monkeypatch):
    assert why_no_products("fp8", CPU) is None and scaled_mode(Mode("int8"), CPU, 0.0, "fp16") == Mode("int8")
    assert "sum in fp32" in scaled_mode(Mode(half_accumulate=True), CPU, 0.0, "fp16").refused
    refused = scaled_mode(Mode("fp8"), CPU, 45.0, "fp16")
    assert refused.kind is None and refused.refused == (
        "fp8 is unavailable (min_db=45 is not measured on its products): fp16 runs instead"
    )


def test_layers_are_what_the_modules_hold(decoder):
    weights = LayerWeights.of(decoder.part("transformer_blocks.1"), None, torch.float32, torch.float32, CPU)
    assert torch.equal(weights.up.weight, decoder.part("transformer_blocks.1").ff.w1.weight)
    assert weights.nbytes == sum(p.nbytes for p in decoder.part("transformer_blocks.1").parameters())


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_locked_parameters(monkeypatch, made, used):
    """Made in inference mode, as a host loads them, and locked outside of it, or the other way round."""
    monkeypatch.setattr(transformer, "staged", torch.clone)
    with torch.inference_mode(made):
        layer = torch.nn.Linear(3, 4).requires_grad_(False)
        want = layer.weight.clone()
    with torch.inference_mode(used):
        transformer._lock(layer)
    with torch.inference_mode():
        assert torch.equal(layer.weight.t().t(), want)
    assert layer.weight.is_inference() == made
    if not made:
        assert torch.equal(layer.weight.t().t(), want)


@pytest.mark.skipif(not (interpreted() and triton_version()), reason="the kernels need Triton's interpreter here")
@pytest.mark.parametrize("kind", [None, "int8"])
def test_layers_with_attention_of_our_own(decoder, monkeypatch, noise, kind):
    """Two layers with kernels are what they are without; tiles in a group have the bits of a tile alone. Not in fp8:
    the interpreter multiplies no bf16."""
    size, step = (2, 3, 3), next(s for s in decoder.program.steps if hasattr(s, "registers"))
    z = [noise(step.c_in, *size) for _ in range(2)]
    made, asked = {}, []
    plain = transformer.attended
    monkeypatch.setattr(transformer, "attended", lambda *a, **k: asked.append(len(a[0])) or plain(*a, **k))
    for together, backend in ((2, "triton"), (1, "triton"), (2, "reference")):
        monkeypatch.setattr(transformer, "tiles_together", lambda *_, n=together: n)
        network = TokenNetwork(decoder, torch.float16, CPU, kind, backend=backend)
        del network.layers[2:]
        run = network.memory(size, 2)
        run.allocate()
        made[together, backend] = torch.stack(list(network.decode(z, 2, lambda: None, run))).float()
    count = transformer.tokens_of(step, *size)
    assert asked == [2 * count] * 2 + [count] * 4
    assert torch.equal(made[1, "triton"], made[2, "triton"])
    want = made[2, "reference"]
    error = (made[2, "triton"] - want).norm() / want.norm()
    assert error < {None: 2e-3, "int8": 0.02}[kind]
