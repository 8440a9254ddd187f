"""Measurements on this machine: speed of the operators, compared with the limits of the hardware."""
