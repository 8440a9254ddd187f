"""Generators that leave no context behind with whoever takes what they yield."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def within(
    context: Callable[[], AbstractContextManager[object]], steps: Generator[T, None, R]
) -> Generator[T, None, R]:
    """`steps`, each of them and its end inside a `context()` of its own; between them it is left."""
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
