"""Generators that are suspended outside of their context, so that it does not affect the code that consumes them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def within(
    context: Callable[[], AbstractContextManager[object]], steps: Generator[T, None, R]
) -> Generator[T, None, R]:
    """Run each step of `steps`, and its end, inside a `context()` of its own; it is left between them."""
    try:
        while True:
            with context():
                try:
                    item = next(steps)
                except StopIteration as end:
                    return end.value
            yield item
    finally:
        with context():
            steps.close()
