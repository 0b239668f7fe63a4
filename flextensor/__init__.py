"""Weight offload for PyTorch models larger than their GPU."""
