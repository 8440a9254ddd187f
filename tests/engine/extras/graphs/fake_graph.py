"""A graph for CPU tests: repeats the recorded operators on the very same tensors with the very same numbers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            self._save(argument, schema)
        for schema in func._schema.arguments:
            self._save(kwargs.get(schema.name), schema)
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def _save(self, argument, schema):
        if isinstance(argument, torch.Tensor) and schema.alias_info is not None and schema.alias_info.is_write:
            storage = argument.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()


class FakeGraph:
    """Stands in for graphs.CudaGraph. Memory is afterwards as if recording had run nothing."""

    #: Graphs made so far, and what replays are said to take.
    made: ClassVar[list] = []
    busy: ClassVar[float | None] = 0.0
    failing: ClassVar[set] = set()
    error: ClassVar[type] = torch.OutOfMemoryError

    def __init__(self, device, pool):
        self.calls = []
        self.replays = 0
        FakeGraph.made.append(self)

    def record(self, work):
        if "record" in FakeGraph.failing:
            raise FakeGraph.error("injected: record")
        recorder = _Recorder()
        try:
            # In inference mode some operators arrive whole, and would be taken for views.
            with torch.inference_mode(False), recorder:
                result = work()
        finally:
            for storage, content in recorder.before.values():
                storage.copy_(content)
        self.calls = recorder.calls
        return result

    def replay(self):
        if "replay" in FakeGraph.failing:
            raise FakeGraph.error("injected: replay")
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            if any(r.alias_info is not None for r in func._schema.returns):
                continue  # a view, or written in place
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

    def milliseconds(self):
        return FakeGraph.busy


class FakeClock:
    """Stands in for graph_rule.Clock: the GPU takes `span` milliseconds; None: it has not come that far."""

    span: ClassVar[float | None] = 0.0
    late: ClassVar[bool] = False

    def start(self):
        pass

    def stop(self):
        pass

    def begun(self):
        return not FakeClock.late

    def milliseconds(self):
        return FakeClock.span
