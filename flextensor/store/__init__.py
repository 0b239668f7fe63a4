"""The host weights: one immutable, unit-addressed file a model; private or shared; loading; pinning."""

from flextensor.store.checkpoint import SafetensorsSource
from flextensor.store.election import StoreProgress
from flextensor.store.errors import (
    MissingWeightError,
    StoreAccessError,
    StoreClosedError,
    StoreCorruptError,
    StoreError,
    StoreSpaceError,
    StoreTimeoutError,
)
from flextensor.store.host_store import HostStore
from flextensor.store.layout import (
    Layout,
    StoredTensor,
    UnitSpec,
    WeightSpec,
    is_dense,
    make_layout,
)
from flextensor.store.private import adopt_store, private_store
from flextensor.store.report import PinReport, ScrubReport, StoreReport
from flextensor.store.scrub import Scrubber
from flextensor.store.shared import SharedStore, shared_store
from flextensor.store.sources import TensorSource, WeightSource

__all__ = [
    "HostStore",
    "Layout",
    "MissingWeightError",
    "PinReport",
    "SafetensorsSource",
    "ScrubReport",
    "Scrubber",
    "SharedStore",
    "StoreAccessError",
    "StoreClosedError",
    "StoreCorruptError",
    "StoreError",
    "StoreProgress",
    "StoreReport",
    "StoreSpaceError",
    "StoreTimeoutError",
    "StoredTensor",
    "TensorSource",
    "UnitSpec",
    "WeightSource",
    "WeightSpec",
    "adopt_store",
    "is_dense",
    "make_layout",
    "private_store",
    "shared_store",
]
