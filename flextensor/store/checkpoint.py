"""SafetensorsSource: weights straight from the files of a checkpoint into the store."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch

from flextensor.checkpoint_files import INDEX, CheckpointFileError, CheckpointTensor, listed_files, read_tensors
from flextensor.store.errors import MissingWeightError, StoreError
from flextensor.store.file_format import DTYPES
from flextensor.store.filling import Reader, thread_count
from flextensor.store.layout import Layout, StoredTensor
from flextensor.store.mapping import buffer_of, typed_view
from flextensor.store.sources import tree_hash

log = logging.getLogger(__name__)

_BLOB = re.compile(r"^[0-9a-f]{64}$")


class SafetensorsSource:
    """A checkpoint folder (``model.safetensors``, or shards with ``model.safetensors.index.json``), or one file.

    names: our weight name -> the checkpoint's key, where they differ (tied weights, prefixes).
    dtype: cast floating-point weights to this dtype on the way; None: the checkpoint's dtype must be the weight's.

    Bytes go from the page cache into the store by ``preadv``, with no tensor in between; only a cast, or a weight
    that is not stored row by row, takes a buffer of its own.

    Raises StoreError when there is no checkpoint or a file is not safetensors.
    """

    def __init__(
        self, directory: str | Path, names: Mapping[str, str] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._names = dict(names or {})
        self._dtype = dtype
        self._entries: dict[str, CheckpointTensor] = {}
        self._used: dict[Path, os.stat_result] = {}
        self._files: dict[Path, int] = {}
        for file in checkpoint_files(Path(directory)):
            try:
                self._entries.update({tensor.name: tensor for tensor in read_tensors(file)})
            except CheckpointFileError as error:
                raise StoreError(f"{error}; download it again") from error
            except OSError as error:
                raise StoreError(f"cannot read {file}: {error.strerror}") from error

    @property
    def entries(self) -> Mapping[str, CheckpointTensor]:
        """The checkpoint's tensors by key."""
        return MappingProxyType(self._entries)

    def check(self, layout: Layout) -> None:
        for tensor in layout.tensors:
            entry = self._entry(tensor)
            if entry.shape != tensor.shape:
                raise MissingWeightError(
                    f"weight {tensor.name!r} has shape {tensor.shape}, checkpoint key {self._key(tensor.name)!r} in "
                    f"{entry.file} has {entry.shape}; is it another model?"
                )
            stored = _dtype_of(entry)
            if stored != tensor.dtype and self._dtype != tensor.dtype:
                raise MissingWeightError(
                    f"weight {tensor.name!r} is {tensor.dtype}, checkpoint key {self._key(tensor.name)!r} in "
                    f"{entry.file} is {stored}; pass dtype={tensor.dtype} to cast it on the way"
                )
            self._used.setdefault(entry.file, os.stat(entry.file))

    def identity(self, layout: Layout) -> str:
        files = sorted({self._entry(tensor).file for tensor in layout.tensors})
        described = [(file.name, os.stat(file).st_size, file_hash(file)) for file in files]
        names = [(tensor.name, self._key(tensor.name)) for tensor in layout.tensors]
        return hashlib.sha256(json.dumps(["safetensors", described, names, str(self._dtype)]).encode()).hexdigest()

    def open(self, tensor: StoredTensor) -> tuple[Reader, bool]:
        entry = self._entry(tensor)
        fd, stored = self._descriptor(entry.file), _dtype_of(entry)
        plain = _is_row_major(tensor)
        if stored == tensor.dtype and plain:

            def read(target: torch.Tensor, start: int) -> None:
                _read_exactly(fd, target, entry.start + start, entry.file)

            return read, True
        if plain:

            def cast(target: torch.Tensor, start: int) -> None:
                first = start // tensor.dtype.itemsize
                count = target.numel() // tensor.dtype.itemsize
                buffer = torch.empty(count * stored.itemsize, dtype=torch.uint8, device="cpu")
                _read_exactly(fd, buffer, entry.start + first * stored.itemsize, entry.file)
                target.view(tensor.dtype).copy_(buffer.view(stored))

            return cast, True

        def permute(target: torch.Tensor, start: int) -> None:
            buffer = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            _read_exactly(fd, buffer, entry.start, entry.file)
            typed_view(target, tensor).copy_(buffer.view(stored).view(entry.shape))

        return permute, False

    def check_unchanged(self) -> None:
        for file, before in self._used.items():
            now = os.stat(file)
            if (before.st_ino, before.st_size, before.st_mtime_ns) != (now.st_ino, now.st_size, now.st_mtime_ns):
                raise StoreError(f"{file} changed while it was read; start again when it is complete")

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]

    def _key(self, name: str) -> str:
        return self._names.get(name, name)

    def _entry(self, tensor: StoredTensor) -> CheckpointTensor:
        key = self._key(tensor.name)
        entry = self._entries.get(key)
        if entry is None:
            near = difflib.get_close_matches(key, list(self._entries), n=3, cutoff=0.4)
            hint = f"; nearest keys: {', '.join(map(repr, near))}" if near else ""
            raise MissingWeightError(
                f"the checkpoint has no key {key!r} for weight {tensor.name!r} of unit {tensor.unit!r}{hint}"
            )
        return entry


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder (or the file itself), in a fixed order.

    Raises StoreError when there is none or the index names a file that is not there.
    """
    if directory.is_file():
        return [directory]
    try:
        files = listed_files(directory)
    except CheckpointFileError as error:
        raise StoreError(f"{error}; download it again") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise StoreError(
            f"{directory / INDEX} names {missing[0]!r}, which is not there ({len(missing)} of {len(files)} missing)"
        )
    if not files:
        raise StoreError(f"no safetensors checkpoint in {directory}; save the model with safe_serialization=True")
    return list(files)


def file_hash(path: Path) -> str:
    """A hash of a file's content.

    A file of the Hugging Face cache is named by its SHA-256 and not read. Others are hashed once, by all cores, and
    remembered under their device, inode, size and times in the user's cache folder; a second process waits for the
    first one's result.
    """
    real = path.resolve()
    if real.parent.name == "blobs" and _BLOB.match(real.name):
        return f"sha256:{real.name}"
    status = os.stat(real)
    stamp = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    cache = _cache_folder() / hashlib.sha256(json.dumps([str(real), stamp]).encode()).hexdigest()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(cache, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.info("hashes of checkpoints are not remembered: %s", error)
        return _hash_now(real)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        known = os.pread(fd, 200, 0).decode("ascii", "replace")
        if re.fullmatch(r"tree:[0-9a-f]{64}\n", known):
            return known.strip()
        value = _hash_now(real)
        with contextlib.suppress(OSError):
            os.pwrite(fd, f"{value}\n".encode(), 0)
        return value
    finally:
        os.close(fd)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flextensor" / "hashes"


def _hash_now(path: Path) -> str:
    size = os.stat(path).st_size
    if size == 0:
        return "tree:" + hashlib.sha256(b"").hexdigest()
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area,
        memoryview(area) as view,
        ThreadPoolExecutor(thread_count(), thread_name_prefix="store-hash") as pool,
    ):
        return "tree:" + tree_hash(size, lambda start, end: view[start:end], pool)


def _dtype_of(entry: CheckpointTensor) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise MissingWeightError(
            f"checkpoint key {entry.name!r} in {entry.file} is {entry.dtype}, which torch has no type for; convert it"
        )
    return DTYPES[entry.dtype]


def _is_row_major(tensor: StoredTensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _read_exactly(fd: int, target: torch.Tensor, offset: int, file: Path) -> None:
    view = buffer_of(target)
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise StoreError(f"{file} ends at byte {offset + done}, before its tensors do; download it again")
        done += count
