"""One question to many workers: all must answer, or the round has failed; or each answers as it can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError

from cluster.messages import WorkerState

T = TypeVar("T")


class RoundFailed(RuntimeError):
    """A round that nobody moved in; the message is the reason."""


@dataclass
class Member:
    """A worker as the coordinator knows it. lost: why it is away ("" when it is there). seen: monotonic seconds.
    incarnation: the process that joined. set_up: it works, but has not joined: it was there before this coordinator's
    own process, or did not answer. own_changes: as many of its own plans as the run knows of. returning: it is being
    told what it has missed."""

    rank: int
    handle: Any
    state: WorkerState | None = None
    seen: float = 0.0
    incarnation: int = 0
    set_up: bool = False
    own_changes: int = 0
    returning: bool = False
    joined: bool = False
    lost: str = ""
    watcher: asyncio.Task[None] | None = None


Question = Callable[[Member], Awaitable[T]]


async def ask(member: Member, question: Question[T], timeout: float) -> T:
    """One worker's answer. Raises TimeoutError, and RayError as the call does."""
    return await asyncio.wait_for(_awaited(question(member)), timeout)


async def ask_all(
    what: str, members: list[Member], question: Question[T], timeout: float, on_lost: Callable[[Member, str], None]
) -> dict[int, T]:
    """The answers of all, by rank.

    Raises RoundFailed as soon as one fails or is late; a worker that died is given to ``on_lost``.
    """

    async def one(member: Member) -> T:
        try:
            return await ask(member, question, timeout)
        except RayActorError as error:
            on_lost(member, why(error))
            raise RoundFailed(f"worker {member.rank} died during {what!r}") from error
        except RayError as error:  # before TimeoutError: a worker's own TimeoutError is both
            raise RoundFailed(f"worker {member.rank}: {why(error)}") from error
        except TimeoutError:
            raise RoundFailed(f"worker {member.rank} did not answer {what!r} within {timeout:.1f} s") from None

    tasks = [asyncio.ensure_future(one(member)) for member in members]
    try:
        answers = await asyncio.gather(*tasks)
    except RoundFailed:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return {member.rank: answer for member, answer in zip(members, answers, strict=True)}


async def ask_each(members: list[Member], question: Question[T], timeout: float) -> list[T | BaseException]:
    """Each one's answer or its failure, in the members' order."""
    return await asyncio.gather(*(ask(member, question, timeout) for member in members), return_exceptions=True)


async def _awaited(reference: Awaitable[T]) -> T:
    return await reference


def why(error: BaseException) -> str:
    """A worker's own exception in one line."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayActorError):
        return f"its process is gone ({type(cause).__name__})"
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
