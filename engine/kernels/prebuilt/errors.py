"""Name what keeps the prebuilt kernels from running."""


class PrebuiltError(RuntimeError):
    """A set that is missing or damaged, a kernel that is not in it, or a driver that does not take it: one line, in the
    driver's own words where it has some. planning/choice.py catches it and decides what runs next."""
