"""The import path of FlexTensor's users for compiled offload."""

from flextensor.compile.correction import apply_correction, correction_outcome
from flextensor.compile.limits import bump_dynamo_limits_for_compiled_offload

__all__ = ["apply_correction", "bump_dynamo_limits_for_compiled_offload", "correction_outcome"]
