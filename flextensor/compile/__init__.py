"""Compiled offload: compile_fn, external compile, the replan tail, the Inductor correction."""
