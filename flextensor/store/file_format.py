"""The store file: a safetensors file whose data begins on a page and whose gaps are tensors of padding.

Any safetensors tool opens it. What those files cannot say is in the metadata, as JSON: units, strides and offsets
(``flextensor.layout``), the identity, a checksum a tensor. Nothing in it is unpickled or executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flextensor.checkpoint_files import MOST_HEADER
from flextensor.store.checksum import Checksum
from flextensor.store.errors import StoreCorruptError
from flextensor.store.layout import PAGE, TENSOR_ALIGNMENT, Layout, StoredTensor, is_dense, round_up, storage_shape
from flextensor.store.mapping import page_size

VERSION = "1"
_PAD = "__padding__."
_METADATA = "__metadata__"
_MOST_DATA = 1 << 50
"""A size with as many digits as any will have."""

SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_PLAIN_BYTES = "U8"
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype
}


@dataclass(frozen=True)
class Manifest:
    """What a store file says of itself. ``header_bytes`` lie before the data, which with padding at its end is
    ``data_bytes``; ``created`` is for people to read."""

    namespace: str
    identity: str
    layout: Layout
    checksums: Mapping[str, str]
    created: str
    header_bytes: int
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        """The size that the file must have."""
        return self.header_bytes + self.data_bytes


def header_size(namespace: str, identity: str, layout: Layout, created: str) -> int:
    """Bytes of the header, before any checksum is known. A multiple of a page."""
    blank = {tensor.name: Checksum().hex() for tensor in layout.tensors}
    return round_up(8 + len(_header_json(namespace, identity, layout, blank, created, _MOST_DATA)), PAGE)


def encode_header(manifest: Manifest) -> bytes:
    """The file's first ``header_bytes``."""
    text = _header_json(
        manifest.namespace,
        manifest.identity,
        manifest.layout,
        manifest.checksums,
        manifest.created,
        manifest.data_bytes,
    )
    length = manifest.header_bytes - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def read_manifest(fd: int, path: str) -> Manifest:
    """The manifest of an open store file, checked as far as it can be without reading the data.

    Raises StoreCorruptError saying what is wrong.
    """
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size, MOST_HEADER) or (length + 8) % PAGE:
        raise StoreCorruptError(f"{path} is not a store file (no page-aligned safetensors header); remove it")
    try:
        header = json.loads(os.pread(fd, length, 8))
        meta = header[_METADATA]
        if meta["flextensor.version"] != VERSION:
            raise StoreCorruptError(
                f"{path} is a store of version {meta['flextensor.version']}, this program writes {VERSION}; remove it"
            )
        layout = _decode_layout(json.loads(meta["flextensor.layout"]))
        manifest = Manifest(
            namespace=str(meta["flextensor.namespace"]),
            identity=str(meta["flextensor.identity"]),
            layout=layout,
            checksums={str(k): str(v) for k, v in json.loads(meta["flextensor.checksums"]).items()},
            created=str(meta["flextensor.created"]),
            header_bytes=length + 8,
            data_bytes=round_up(length + 8 + layout.nbytes, page_size(fd)) - length - 8,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StoreCorruptError(f"{path}: its manifest cannot be read ({error!r}); remove it") from error
    if manifest.file_bytes != size:
        raise StoreCorruptError(f"{path} has {size} bytes, its manifest says {manifest.file_bytes}; remove it")
    if set(manifest.checksums) != set(layout.by_name):
        raise StoreCorruptError(f"{path}: checksums and tensors do not match; remove it")
    return manifest


def first_difference(found: Layout, wanted: Layout) -> str:
    """Which tensor differs between two layouts, in words; empty when they are equal."""
    for name, tensor in wanted.by_name.items():
        other = found.by_name.get(name)
        if other is None:
            return f"weight {name!r} is missing"
        if other != tensor:
            return f"weight {name!r} is {other}, wanted {tensor}"
    extra = [name for name in found.by_name if name not in wanted.by_name]
    if extra:
        return f"weight {extra[0]!r} is not wanted"
    return "" if found.nbytes == wanted.nbytes else f"it has {found.nbytes} bytes, wanted {wanted.nbytes}"


def _header_json(
    namespace: str, identity: str, layout: Layout, checksums: Mapping[str, str], created: str, data_bytes: int
) -> bytes:
    header: dict[str, Any] = {
        _METADATA: {
            "format": "pt",
            "flextensor.version": VERSION,
            "flextensor.namespace": namespace,
            "flextensor.identity": identity,
            "flextensor.created": created,
            "flextensor.layout": json.dumps(_encode_layout(layout)),
            "flextensor.checksums": json.dumps(dict(checksums)),
        }
    }
    end = 0
    for index, tensor in enumerate(layout.tensors):
        if tensor.name == _METADATA or tensor.name.startswith(_PAD):
            raise ValueError(f"a weight cannot be called {tensor.name!r}: the safetensors format uses that name")
        if tensor.offset > end:
            header[f"{_PAD}{index}"] = _entry(_PLAIN_BYTES, (tensor.offset - end,), end, tensor.offset)
        end = tensor.offset + tensor.nbytes
        known = SAFETENSORS_NAMES.get(tensor.dtype)
        shape = storage_shape(tensor.shape, tensor.stride) if known else (tensor.nbytes,)
        header[tensor.name] = _entry(known or _PLAIN_BYTES, shape, tensor.offset, end)
    if data_bytes > end:
        header[f"{_PAD}{len(layout.tensors)}"] = _entry(_PLAIN_BYTES, (data_bytes - end,), end, data_bytes)
    return json.dumps(header, separators=(",", ":")).encode()


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _encode_layout(layout: Layout) -> dict[str, Any]:
    rows = [
        [t.name, t.unit, str(t.dtype).removeprefix("torch."), t.shape, t.stride, t.offset, t.nbytes]
        for t in layout.tensors
    ]
    return {"nbytes": layout.nbytes, "tensors": rows}


def _decode_layout(data: dict[str, Any]) -> Layout:
    tensors = []
    end = 0
    for name, unit, dtype_name, shape, stride, offset, nbytes in data["tensors"]:
        dtype = _TORCH_DTYPES[dtype_name]
        tensor = StoredTensor(str(name), str(unit), dtype, tuple(shape), tuple(stride), offset, nbytes)
        numbers = (*tensor.shape, *tensor.stride, offset, nbytes)
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"weight {name!r} has a wrong size")
        elements = 1
        for size in tensor.shape:
            elements *= size
        if (
            offset < end
            or offset % TENSOR_ALIGNMENT
            or nbytes != elements * dtype.itemsize
            or len(tensor.shape) != len(tensor.stride)
            or not is_dense(tensor.shape, tensor.stride)
        ):
            raise ValueError(f"weight {name!r} overlaps, is misaligned, or does not have the bytes of its shape")
        end = offset + nbytes
        tensors.append(tensor)
    if type(data["nbytes"]) is not int or data["nbytes"] < end:
        raise ValueError("the data is shorter than its tensors")
    layout = Layout(tuple(tensors), data["nbytes"])
    if len(layout.by_name) != len(tensors):
        raise ValueError("two weights have one name")
    return layout
