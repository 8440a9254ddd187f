"""Packed networks on disk, so that the next start neither composes nor quantises weights."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import log
from ...precision.digest import digest
from ...precision.forms import Operands
from ...runtime.arena import ALIGN
from ...runtime.pressure import out_of_memory
from ...system.devices import empty_device_cache, gaps
from ..output.writing import stamp, write_tensors
from .store import keep

#: Part of every recipe: raise it when packing changes.
FORMAT = 4
T = TypeVar("T")


def recipe(operands: Operands, *rest: object) -> str:
    """Return a name for everything that a packed network was made from, except the weight file.

    Args:
        operands: types and policy that it is packed for.
        rest: other values that it depends on.
    """
    parts = [FORMAT, str(operands.dtype), operands.policy.as_dict(), *map(str, rest)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save(network: object, path: Path, made_from: str) -> None:
    """Write all tensors of a packed network and their digest; log once where the folder cannot be written.

    Args:
        network: the packed network.
        path: the file.
        made_from: name from `recipe`.
    """
    tensors = {name: _upright(t).detach().cpu().contiguous() for name, t in _tensors(network).items()}
    keep(path, lambda place: write_tensors(place, tensors, {"recipe": made_from, "digest": digest(tensors)}))


def load(plan: T, path: Path, made_from: str, device: torch.device) -> T | None:
    """Return a packed network with the tensors of a file; None if the file holds something else or is damaged.

    The digest takes 0.2 s for the published decoder on one core, and cores share the work.

    Args:
        plan: the network, packed on the meta device.
        path: the file.
        made_from: name from `recipe`, which the file must have.
        device: where the tensors are put.
    """
    from safetensors import SafetensorError

    expected, before = _tensors(plan), stamp(path)
    try:
        with _opened(path) as (metadata, there, get):
            if metadata.get("recipe") != made_from or there != set(expected):
                return None
            found = {name: get(name) for name in expected}
            if metadata.get("digest") != digest(found):
                return _unusable(path, before, "not what was written (a damaged disk or copy?)")
            found = {name: tensor.to(device, copy=True) for name, tensor in found.items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        if out_of_memory(error) and not isinstance(error, MemoryError):
            raise  # the device's memory, which a leaner plan may need less of
        return _unusable(path, before, f"not usable ({type(error).__name__})")
    for name, like in expected.items():
        upright = _upright(like)
        if (found[name].shape, found[name].dtype) != (upright.shape, upright.dtype):
            return None
        found[name] = found[name] if upright is like else found[name].t()
    return _mapped(plan, "", lambda name, _: found[name])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Mapping[str, str], set[str], Callable[[str], Tensor]]]:
    """Provide a file's metadata, the names of its tensors, and a function that returns the tensor of a name. The file
    is mapped, and read where that fails."""
    from safetensors import safe_open
    from safetensors.torch import load

    with torch.device("cpu"), ExitStack() as stack:  # the library names no device when it makes tensors
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            found = file.metadata() or {}, set(file.keys()), file.get_tensor
        except (OSError, MemoryError, RuntimeError) as error:  # a share that cannot map, or too little address space
            if isinstance(error, RuntimeError) and "unable to mmap" not in str(error):  # torch's own mapping
                raise
            data = path.read_bytes()
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            found = header.get("__metadata__", {}), set(tensors), tensors.__getitem__
        yield found


def _unusable(path: Path, before: object, why: str) -> None:
    """Log that the file is unusable, unless another process has replaced it since `before`.

    The library opens the file twice, for its header and for its tensors."""
    if stamp(path) == before:
        log.once(f"{path}: {why}, weights are packed anew")


def gathered(make: Callable[[], T], others: Iterable[Tensor], device: torch.device, room: int | None = None) -> T:
    """Return a packed network whose tensors on a GPU are copied into one block of memory.

    Packing goes through fp32, and its results lie among temporaries several times their size: torch's allocator cannot
    free a segment while a part of it is in use (0.87 GB stayed reserved of HunyuanVideo 1.5's decoder in Winograd
    form).

    Args:
        make: returns the packed network.
        others: tensors that stay on the device; tensors that share memory with one of them are not copied.
        device: the GPU.
        room: bytes that a second copy may take for a moment (None: as many as there are); with less, the copy goes
            through host memory, which takes longer.
    """
    network, kept = make(), {_address(t) for t in others}
    own = [t for t in {id(t): t for t in _tensors(network).values()}.values()
           if t.device == device and _address(t) not in kept and _upright(t).is_contiguous()]  # fmt: skip
    if room is None or sum(map(_room, own)) + gaps(device) <= room:
        try:
            return _placed(network, own, device)[0]
        except Exception as error:
            if not out_of_memory(error):
                raise
    network, own = _placed(network, own, torch.device("cpu"))
    empty_device_cache()
    return _placed(network, own, device)[0]


def _placed(network: T, own: list[Tensor], device: torch.device) -> tuple[T, list[Tensor]]:
    """Return the network with copies of the tensors `own`, consecutive in one block on `device`, and these copies."""
    # They may have been packed in a caller's inference mode, and are used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        sizes = list(map(_room, own))
        parts = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes) if own else ()
        copies = []
        for t, part in zip(own, parts, strict=True):
            upright = _upright(t)
            copied = part[: t.nbytes].view(t.dtype).view(upright.shape).copy_(upright)
            copies.append(copied if upright is t else copied.t())
    made = {id(t): copied for t, copied in zip(own, copies, strict=True)}
    return _mapped(network, "", lambda _, tensor: made.get(id(tensor), tensor)), copies


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN) * ALIGN


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _upright(tensor: Tensor) -> Tensor:
    """Return a transposed matrix as it lies in memory, others unchanged: a product's rounding may depend on it."""
    return tensor.t() if tensor.dim() == 2 and not tensor.is_contiguous() else tensor


def _tensors(network: object) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    _mapped(network, "", note)
    return found


def _mapped(value: Any, name: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Copy nested objects, dataclasses, lists and tuples, with every tensor replaced by `change(name, tensor)`."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(v, f"{name}.{i}", change) for i, v in enumerate(value))
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: _mapped(v, f"{name}.{k}", change) for k, v in fields.items()})
    if hasattr(value, "__dict__"):
        out = copy.copy(value)
        vars(out).update({k: _mapped(v, f"{name}.{k}", change) for k, v in vars(value).items()})
        return out
    return value
