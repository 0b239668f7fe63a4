"""How much host memory the weights take, summed over the processes that share them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from flextensor.store.host_store import HostStore, MappedStore
from flextensor.store.mapping import pss_bytes
from flextensor.store.shared import SharedStore


def weights_pss(pids: Iterable[int], store: HostStore) -> int:
    """Proportional set size of the store's mappings over processes, in bytes: a page that n processes map counts 1/n
    in each, so the sum over all of them is the memory that the weights take. Processes that are gone count nothing.

    A shared store is found in every process; a private one only in this process, whatever ``pids`` are.

    Raises ValueError for an adopted store, whose tensors lie among the process's other memory; PermissionError for
    another user's process.
    """
    if isinstance(store, SharedStore):
        if store.page_bytes > mmap.PAGESIZE:  # the kernel counts no shares of huge pages that were set aside
            holders = set(store.report().holders or ())
            return store.file_bytes * len(holders & set(pids)) // max(1, len(holders))
        total = 0
        for pid in pids:
            try:
                total += pss_bytes(pid, files=(store.file_key,))
            except ProcessLookupError:
                continue
        return total
    if isinstance(store, MappedStore):
        start = store.memory.data_ptr()
        return pss_bytes(None, address=(start, start + store.memory.numel()))
    raise ValueError(f"a {store.kind} store has no mapping of its own to measure")
