"""Packed networks on disk, so that the next start neither composes nor quantises weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ... import log
from ...network.gathered import mapped, tensors_of, upright
from ...precision.digest import digest
from ...precision.forms import Operands
from ...runtime.pressure import out_of_memory
from ..output.cache import keep
from ..output.writing import stamp, write_tensors

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
    tensors = {name: upright(t).detach().cpu().contiguous() for name, t in tensors_of(network).items()}
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

    expected, before = tensors_of(plan), stamp(path)
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
        lying = upright(like)
        if (found[name].shape, found[name].dtype) != (lying.shape, lying.dtype):
            return None
        found[name] = found[name] if lying is like else found[name].t()
    return mapped(plan, "", lambda name, _: found[name])


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
