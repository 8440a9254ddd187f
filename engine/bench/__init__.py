"""Measurements on this machine: what the operators reach beside what the hardware allows."""
