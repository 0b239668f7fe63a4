"""Turns on a link that several processes share."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest

from flextensor.runtime.turns import turn


@pytest.fixture
def link() -> str:
    return f"test-{uuid.uuid4()}"


def test_no_two_have_their_turn_at_once_and_all_get_one(link: str) -> None:
    there, seen = 0, []

    def measure() -> None:
        nonlocal there
        with turn(link, patience=120) as alone:
            there += 1
            seen.append((alone, there))
            time.sleep(0.02)
            there -= 1

    threads = [threading.Thread(target=measure) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(True, 1)] * 5


def test_a_turn_is_waited_for_only_so_long_and_links_do_not_wait_for_each_other(link: str) -> None:
    with turn(link) as first, turn(f"{link}-other") as other, turn(None) as own, turn(None) as own_again:
        assert first and other and own and own_again
        with turn(link, patience=0.05) as late:
            assert late is False
    with turn(link, patience=0) as again:
        assert again is True


def test_the_turn_of_a_process_that_is_killed_is_free(link: str) -> None:
    script = (
        "import time\nfrom flextensor.runtime.turns import turn\n"
        f"with turn({link!r}):\n print('in', flush=True)\n time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        with turn(link, patience=0.05) as alone:
            assert alone is False
        process.kill()
        with turn(link, patience=120) as alone:
            assert alone is True
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fails", ["socket", "bind"])
def test_where_no_such_sockets_are_allowed_nobody_waits(fails: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    class Refused(real):
        def __init__(self, *arguments: int) -> None:
            if fails == "socket":
                raise PermissionError(errno.EPERM, "not permitted")
            super().__init__(*arguments)

        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(socket, "socket", Refused)
    start = time.monotonic()
    with turn(link, patience=250) as alone:
        assert alone is False and time.monotonic() - start < 125
