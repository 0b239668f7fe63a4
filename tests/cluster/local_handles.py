"""Real workers in this process behind handles like Ray's: calls run in threads, errors come as Ray raises them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayTaskError


class LocalHandle:
    """``handle.method.remote(...)`` of an object in this process. before: called with a method's name first, in its
    thread: what befalls a worker just then."""

    def __init__(self, worker: Any, before: Callable[[str], None] = lambda method: None) -> None:
        self._worker, self._before = worker, before

    def __getattr__(self, name: str) -> Any:
        return _Method(self._worker, name, self._before)


class _Method:
    def __init__(self, worker: Any, name: str, before: Callable[[str], None]) -> None:
        self._worker, self._name, self._before = worker, name, before

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(asyncio.to_thread(self._call, arguments))

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        self._before(self._name)
        try:
            return getattr(self._worker, self._name)(*arguments)
        except Exception as error:
            raise RayTaskError(self._name, str(error), error).as_instanceof_cause() from error
