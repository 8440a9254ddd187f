"""One call on several devices of this process, or on the ranks that torchrun started."""
