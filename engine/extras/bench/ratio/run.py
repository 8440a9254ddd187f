"""Run this pack's kernels for a consumer card on an H100 or H200 whose products are slowed to that card's rate.

"At the ratio of CARD" is what such times are called, never measured on that card: its processor makes as many products
beside its shared memory, arithmetic and L2 in a clock, and holds as many blocks, as the card's does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ....errors import InputError
from ....kernels import launching
from ....kernels.cards import card
from ....kernels.gpus import GPUS, WINOGRAD, Found, Gpu, find
from ....kernels.prebuilt import launch
from ....kernels.prebuilt.driver import driver
from ....kernels.prebuilt.keys import Key
from ....kernels.prebuilt.library import Entry, library
from ....kernels.targets import Target, standing_in, under
from ...output.cache import cache_folder
from ..form import in_form, padded
from .assemble import check, slowed
from .text import KINDS, repeated
from .unit import factors, measure

#: k of every kind: products as they are.
PLAIN = dict.fromkeys(KINDS, 1.0)
#: A GPU whose measured rates are within this share of the table's takes the table's, so that texts which were assembled
#: on another machine serve it.
_SAME = 0.02
#: Threads of a block, in a kernel's text.
_THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")
_TRITON_CACHE = "TRITON_CACHE_DIR"


@dataclass(frozen=True)
class Ratio:
    """A card's ratio on the GPU at hand.

    gpu: the card. device: the GPU at hand. form: generation whose code Triton compiles, None: prebuilt kernels.
    factors: k by kind. measured: multiply-adds a clock and processor of the GPU at hand. mhz, processors: its own.
    folder: of assembled texts. tool: path of the assembler, None: as found.
    """

    gpu: Gpu
    device: torch.device
    form: str | None
    factors: Mapping[str, float]
    measured: Mapping[str, float]
    mhz: float
    processors: int
    folder: Path | None
    tool: str | None = None

    @property
    def words(self) -> str:
        """Return what times of this are called, in one line."""
        k = ", ".join(f"{self.factors[kind]:.2f} {name}" for kind, name in
                      (("f32", "with fp32 sums"), ("f16", "with fp16 sums"), ("s32", "in int8")))  # fmt: skip
        return f"at the ratio of {self.gpu.name} (products repeated {k}; not measured on that card)"

    def tflops(self, kind: str) -> float:
        """Return the most TFLOP/s (int8: TOP/s) that products of a kind reach on the GPU at hand at this ratio."""
        return 2e-6 * self.measured[kind] / self.factors[kind] * self.processors * self.mhz

    def scaled(self, factors: Mapping[str, float]) -> Ratio:
        """Return the same with other k."""
        return replace(self, factors=dict(factors))

    @contextmanager
    def running(self) -> Iterator[Target]:
        """Run kernels inside at this ratio. VAEs loaded outside must not run inside, nor the other way round.

        Raises: RatioError, when a kernel is loaded whose products cannot be repeated so."""
        with ExitStack() as stack:
            stack.callback(_forget)
            _forget()
            if self.form is None:
                yield stack.enter_context(self._prebuilt())
            else:
                stack.enter_context(self._by_triton())
                yield stack.enter_context(in_form(self.form, self.device))

    def code(self, text: str, name: str) -> bytes:
        """Return the machine code of a kernel's text at this ratio, its products counted. Raises RatioError."""
        sm = _sm(self.device) if self.device.type == "cuda" else 90
        return slowed(text, self.factors, sm, name, self.folder, self.device.index or 0, self.tool)

    @contextmanager
    def _prebuilt(self) -> Iterator[Target]:
        name, sm, driving, sets = torch.cuda.get_device_name(self.device), _sm(self.device), driver(), library()
        chosen = under(prebuilt_form(self.gpu, sm), name, sm)
        if not chosen.kernels:
            raise InputError(f"--ratio {self.gpu.name!r}: {chosen.notes[0]}")
        load, entry = driving.load, sets.entry

        def loaded(device: int, ptx: bytes, symbol: str, shared: int) -> int:
            text = ptx.decode()
            threads = _THREADS.search(text)
            return load(device, self.code(text, symbol), symbol, padded(shared, int(threads[1]) // 32))

        def held(form: str, key: Key) -> Entry:
            found = entry(form, key)
            return replace(found, shared=padded(found.shared, found.warps))

        # Kernels are loaded when they are launched: those of other sizes would have to be assembled, too. So parts of a
        # set stay unpacked: the next form reads them again.
        driving.load, sets.entry, sets.texts, sets.forget = loaded, held, lambda *_: [], lambda *_: None
        try:
            chosen = replace(chosen, winograd=WINOGRAD[self.gpu.rates])
            with standing_in(chosen):
                yield chosen
        finally:
            del driving.load, sets.entry, sets.texts, sets.forget

    @contextmanager
    def _by_triton(self) -> Iterator[None]:
        from triton import knobs
        from triton.backends.nvidia.compiler import CUDABackend

        made, driving = CUDABackend.make_cubin, driver()
        load = driving.load

        def loaded(device: int, ptx: bytes, symbol: str, shared: int) -> int:
            """Of the kernels that this pack writes itself."""
            return load(device, self.code(ptx.decode(), symbol), symbol, shared)

        def cubin(backend: Any, text: str, metadata: dict[str, Any], *rest: Any) -> bytes:
            code, more = made(backend, text, metadata, *rest), repeated(text, self.factors, metadata["name"])
            if more.before != more.after:
                plain, code = code, made(backend, more.text, metadata, *rest)
                check(metadata["name"], plain, code, more)
            return code

        digest = sha256(repr(sorted(self.factors.items())).encode()).hexdigest()[:12]
        before = os.environ.get(_TRITON_CACHE)
        os.environ[_TRITON_CACHE] = str(Path(knobs.cache.dir) / f"ratio-{digest}")
        CUDABackend.make_cubin, driving.load = cubin, loaded
        try:
            _forget_compiled()
            yield
        finally:
            CUDABackend.make_cubin = made
            del driving.load
            _forget_compiled()
            if before is None:
                del os.environ[_TRITON_CACHE]
            else:
                os.environ[_TRITON_CACHE] = before


def ratio_of(name: str, form: str | None, device: torch.device, folder: Path | None = None) -> Ratio:
    """Return the ratio of a card on a device, whose products are measured for it.

    Args:
        name: of the card, as people write it.
        form: value of `--as`; None: prebuilt kernels.
        device: the GPU at hand.
        folder: of assembled texts; None: in the cache folder.

    Raises: InputError where that is not possible, with the reason.
    """
    gpu = checked(find(name, "--ratio"), form, device)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if folder is None and (kept := cache_folder()) is not None:
        folder = kept / "ratio"
    unit = measure(device, folder)
    known = next((one for one in GPUS if one.name in torch.cuda.get_device_name(device)), None)
    rates = unit.rates
    if known and all(abs(rates[kind] / rate - 1) < _SAME for kind, rate in known.products.items()):
        rates = known.products
    return Ratio(gpu, device, form, factors(rates, gpu.products), unit.rates, unit.mhz,
                 torch.cuda.get_device_properties(device).multi_processor_count, folder)  # fmt: skip


def checked(found: Found, form: str | None, device: torch.device) -> Gpu:
    """Return the card. Raises InputError where a GPU cannot stand for it."""
    gpu, option = found.gpu, f"--ratio {found.name!r}"
    if gpu is None:
        raise InputError(f"{option}: {found.why or 'is a generation'}: name a card whose processors, clock and "
                         "products are known, such as RTX 5070 Ti")  # fmt: skip
    if card(gpu.sm).native or not card(gpu.sm).forms:
        raise InputError(f"{option}: that card runs code of its own, not that of consumer cards")
    if form is not None and form != f"sm_{gpu.sm}":
        raise InputError(f"{option}: is of the generation sm_{gpu.sm}, so --as {form} does not go with it")
    if device.type != "cuda":
        raise InputError(f"{option}: needs an H100 or H200, not {device}")
    if _sm(device) != 90:
        raise InputError(f"{option}: needs an H100 or H200, whose processors make more products than any consumer "
                         f"card's; this is {torch.cuda.get_device_name(device)}")  # fmt: skip
    return gpu


def prebuilt_form(gpu: Gpu, sm: int) -> str:
    """Return the form of the prebuilt kernels that the card runs, the best of those whose code a GPU of compute
    capability `sm` runs, too."""
    return next(form for form in card(gpu.sm).forms if form in card(sm).forms)


def refuse_fp8(precisions: list[str], option: str) -> None:
    """Raise InputError where fp8 is among the precisions: the GPU at hand cannot slow its products."""
    if "fp8" in precisions:
        raise InputError(f"{option}: fp8 cannot be timed so: an H100 or H200 has no fp8 mma.sync and multiplies in "
                         "fp16 there. int8 makes as many products a clock as block-scaled fp8, of as many bytes")


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _forget() -> None:
    """Have kernels loaded anew: those that were loaded have other products."""
    launch._loaded.clear()
    launch._complete.clear()
    launching._launchers.clear()


def _forget_compiled() -> None:
    """Have Triton ask its cache folder anew for every kernel."""
    for name in launching.SOURCES:  # functions of Triton's interpreter have no cache
        getattr(launching.function(name), "device_caches", {}).clear()
