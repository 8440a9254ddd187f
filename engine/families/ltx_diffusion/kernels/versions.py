"""Parts of Triton's lower-level language (Gluon) whose names differ between its versions."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

#: All threads of a program wait for each other.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
