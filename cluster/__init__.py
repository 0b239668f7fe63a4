"""Many processes, one GPU each, on Ray. Knows the engine through its public API."""
