"""What can go wrong with host weights; each message names the thing, its value and the remedy."""

from __future__ import annotations


class StoreError(RuntimeError):
    """Base of all errors of the host store."""


class StoreClosedError(StoreError):
    """The store was closed; its tensors can no longer be asked for."""


class StoreSpaceError(StoreError):
    """The tmpfs or the memory cannot hold the weights.

    needed, free: bytes.
    """

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[StoreSpaceError], tuple[str, int, int]]:
        return type(self), (str(self), self.needed, self.free)  # it crosses processes


class StoreTimeoutError(StoreError):
    """Another process fills the store and was not done within ``wait_timeout``."""


class StoreCorruptError(StoreError):
    """A store file, or bytes in it, are not what they must be.

    tensors: names of the weights whose bytes differ from their checksums (empty: the file itself is wrong).
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors

    def __reduce__(self) -> tuple[type[StoreCorruptError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.tensors)


class StoreAccessError(StoreError):
    """A store file is not ours to use: owner, mode or type is wrong."""


class MissingWeightError(StoreError, KeyError):
    """A checkpoint has no tensor for a weight, or one of another shape or dtype."""

    def __str__(self) -> str:
        return str(self.args[0])
