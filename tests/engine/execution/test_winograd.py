"""The Winograd form in registers in whole decodes: where the driver refuses its kernels."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.conv3d import dispatch
from zerowaste_vae.engine.kernels.conv3d.winograd2d import launch as form
from zerowaste_vae.engine.kernels.prebuilt import launch
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.planning.choice import Choices

CPU, WIDTHS = torch.device("cpu"), (64, 64, 64, 64)


class Driver:
    """Takes no text (what: "load"), or runs none ("launch")."""

    def __init__(self, what):
        self.what, self.asked = what, []

    def load(self, device, ptx, symbol, shared):
        self.asked.append(symbol)
        if self.what == "load":
            raise PrebuiltError(f"the driver refuses {symbol}: a PTX JIT compilation failed (CUDA error 218)")
        return 7

    def launch(self, *of):
        raise PrebuiltError("a launch of 8 blocks failed: too many resources requested (CUDA error 701)")


@pytest.fixture
def card(monkeypatch):
    """An RTX 50 whose kernels are the references on this CPU."""
    here = capabilities("RTX 5070 Ti", 120, (3, 6))
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(targets, "_winograd_off", {})
    def now(*_):
        return replace(here, winograd_off=targets._winograd_off.get(CPU, ""))

    monkeypatch.setattr(Choices, "of", now)
    monkeypatch.setattr("zerowaste_vae.engine.options.target", now)
    return here


@pytest.mark.parametrize("what", ["load", "launch"])
def test_a_driver_that_refuses_it(card, make_vae_file, noise, monkeypatch, caplog, what):
    """Only this form is off, with the reason, said once; what is finished stays, and the direct form runs on."""
    path, z = make_vae_file(WIDTHS, WIDTHS), noise(1, 16, 2, 2, 2)
    direct, vae, other = (load(path, precision="fp16", device="cpu") for _ in range(3))
    expected = direct.decode(z)
    for one in (vae, other):
        one.options = one.options.switched(on=["winograd"])
    driver, reference = Driver(what), dispatch.reference.conv3d
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(form, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def conv3d(x, weight, *of):
        return form.launch(x, weight, *of[:-1]) if weight.tiles else reference(x, weight, *of)

    monkeypatch.setattr(dispatch.reference, "conv3d", conv3d)
    assert torch.equal(vae.decode(z), expected) and len(driver.asked) == 1
    why = {"load": "a PTX JIT compilation failed", "launch": "too many resources requested"}[what]
    off = dict(vae.last_report.off)
    assert why in off["winograd"] and "newer driver" in off["winograd"] and "triton_fusion" not in off
    assert vae.last_report.kernels == "Triton's kernels"
    assert caplog.text.count("direct convolutions from here on") == 1
    assert torch.equal(other.decode(z), vae.decode(z)) and len(driver.asked) == 1  # never asked again
    assert caplog.text.count("direct convolutions from here on") == 1
