"""What people read at a run's end."""

from __future__ import annotations

from typing import Any

from cluster.messages import JobProgress
from launch import words
from launch.report import compile_lines


def compiled(compiled: int, shared: int, eager: int = 0, pending: int = 0, graphs: int = 1) -> dict[str, Any]:
    return {
        "compile": {"compiled": compiled, "shared": shared, "eager": eager, "pending": pending, "graphs": graphs},
    }


def test_workers_that_compiled_alike_share_a_line_and_eager_units_are_told() -> None:
    text = compiled(0, 0, eager=3, graphs=0)  # a manager of which nothing was to be compiled
    alike = {"task": {"managers": {"a": compiled(1, 7), "b": compiled(0, 8, graphs=0), "text": text}}}
    left = {"task": {"managers": {"a": compiled(1, 6, eager=1), "b": compiled(0, 7, pending=1, graphs=0)}}}
    details = [{"rank": 0, **alike}, {"rank": 1, **alike}, {"rank": 2, **left}]
    assert compile_lines(details) == [
        "worker 0, 1: 16 units run 1 compiled graph",
        "worker 2: 14 units run 1 compiled graph, 1 eager, 1 not called yet",
    ]


def test_a_run_that_compiles_nothing_says_nothing_of_it() -> None:
    engine = compiled(0, 0, eager=12, graphs=0)
    assert compile_lines([{"rank": 0, "task": {"model": "x"}, "engine": engine}, {"rank": 1}]) == []
    assert compile_lines([{"rank": 0, "task": {}, "engine": compiled(1, 11)}]) == [
        "worker 0: 12 units run 1 compiled graph"
    ]


def test_a_rate_is_told_once_there_is_one_and_in_what_the_results_have() -> None:
    def progress(done: int, tokens: int) -> JobProgress:
        return JobProgress(total=4, done=done, skipped=0, failed=0, tokens=tokens, started=10.0, updated=40.0)

    assert words.rate(progress(0, 0)) == ""
    assert words.rate(progress(2, 0)) == "4.0 items/min"
    assert words.rate(progress(2, 300)) == "10.0 tokens/s"
