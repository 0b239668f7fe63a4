"""The import path of FlexTensor's users for the registry of managers."""

from flextensor.registry import get_offload_manager

__all__ = ["get_offload_manager"]
