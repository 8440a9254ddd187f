"""One clip passing through a network: its memory, its place in time, and the rescue when memory or range runs out."""
