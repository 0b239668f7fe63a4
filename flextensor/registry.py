"""The named managers of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flextensor.units import OffloadError

if TYPE_CHECKING:
    from flextensor.manager import OffloadManager

DEFAULT_NAME = "default"

_managers: dict[str, OffloadManager] = {}


def add(manager: OffloadManager) -> None:
    """Make ``manager`` known under its name. Raises OffloadError when the name is taken."""
    if manager.name in _managers:
        raise OffloadError(
            f"there is an offload manager named {manager.name!r} already; pass another name=, or release() it first"
        )
    _managers[manager.name] = manager


def discard(name: str) -> None:
    """Forget a manager; no effect when it is not known."""
    _managers.pop(name, None)


def names() -> list[str]:
    """The names of all managers."""
    return list(_managers)


def get_offload_manager(name: str = DEFAULT_NAME) -> OffloadManager:
    """The manager of that name. Raises OffloadError, naming the known ones, when there is none."""
    try:
        return _managers[name]
    except KeyError:
        known = ", ".join(repr(known) for known in _managers) or "none"
        raise OffloadError(f"no offload manager named {name!r}; known: {known}") from None
