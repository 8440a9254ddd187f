"""The tensors of a packed network: named, exchanged for others, and on a GPU gathered into one block of memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..runtime.arena import ALIGN
from ..runtime.pressure import out_of_memory
from ..system.devices import empty_device_cache, gaps

T = TypeVar("T")


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
    own = [t for t in {id(t): t for t in tensors_of(network).values()}.values()
           if t.device == device and _address(t) not in kept and upright(t).is_contiguous()]  # fmt: skip
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
            lying = upright(t)
            copied = part[: t.nbytes].view(t.dtype).view(lying.shape).copy_(lying)
            copies.append(copied if lying is t else copied.t())
    made = {id(t): copied for t, copied in zip(own, copies, strict=True)}
    return mapped(network, "", lambda _, tensor: made.get(id(tensor), tensor)), copies


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN) * ALIGN


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def upright(tensor: Tensor) -> Tensor:
    """Return a transposed matrix as it lies in memory, others unchanged: a product's rounding may depend on it."""
    return tensor.t() if tensor.dim() == 2 and not tensor.is_contiguous() else tensor


def tensors_of(network: object) -> dict[str, Tensor]:
    """Return the tensors of a packed network by their places in it."""
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    mapped(network, "", note)
    return found


def mapped(value: Any, name: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Copy nested objects, dataclasses, lists and tuples, with every tensor replaced by `change(name, tensor)`."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, f"{name}.{i}", change) for i, v in enumerate(value))
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: mapped(v, f"{name}.{k}", change) for k, v in fields.items()})
    if hasattr(value, "__dict__"):
        out = copy.copy(value)
        vars(out).update({k: mapped(v, f"{name}.{k}", change) for k, v in vars(value).items()})
        return out
    return value
