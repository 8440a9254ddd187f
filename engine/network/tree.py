"""Place modules, and parameters that belong to none, under the dotted names that a file has for them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class Branch(nn.Module):
    """One component of a dotted name. Numbered children are found by index, as in a list."""

    def __getitem__(self, index: int) -> nn.Module:
        if index < 0:
            index += len(self._modules)
        return self._modules[str(index)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)


def find(root: nn.Module, name: str) -> nn.Module:
    """Return the module or parameter that `graft` put under `name`."""
    for part in name.split("."):
        root = root._modules[part] if part in root._modules else root._parameters[part]  # type: ignore[assignment]
    return root


def graft(root: nn.Module, name: str, module: nn.Module | nn.Parameter) -> None:
    """Put `module` under its dotted name, creating the branches that are missing."""
    *parents, leaf = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root._modules[parent] = Branch()
        root = root._modules[parent]  # type: ignore[assignment]
    if isinstance(module, nn.Parameter):
        root.register_parameter(leaf, module)
        return
    root._modules[leaf] = module  # add_module refuses names of methods, and a file may have a "mid" or a "half"
