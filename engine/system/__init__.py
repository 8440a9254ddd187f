"""The machine: its devices and memory, files that are written whole, and start options of the surrounding program."""
