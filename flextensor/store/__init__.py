"""The host weights: one immutable, unit-addressed file a model; private or shared; loading; pinning."""

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
from flextensor.store.report import PinReport, StoreReport

__all__ = [
    "HostStore",
    "Layout",
    "MissingWeightError",
    "PinReport",
    "StoreAccessError",
    "StoreClosedError",
    "StoreCorruptError",
    "StoreError",
    "StoreReport",
    "StoreSpaceError",
    "StoreTimeoutError",
    "StoredTensor",
    "UnitSpec",
    "WeightSpec",
    "adopt_store",
    "is_dense",
    "make_layout",
    "private_store",
]
