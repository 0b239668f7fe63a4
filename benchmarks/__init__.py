"""Measurements of the program, each a program of its own: ``python -m benchmarks.NAME``."""
