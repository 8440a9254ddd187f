"""Name what keeps the prebuilt kernels from running."""


class PrebuiltError(RuntimeError):
    """A set that is missing or damaged, a kernel that is not in it, or a driver that does not take it: one line, in the
    driver's own words where it has some. planning/choice.py catches it and decides what runs next."""


class WrittenError(PrebuiltError):
    """A kernel whose text this pack writes when it runs does not run here: no driver, or one that refuses it. The
    others do not depend on it."""
