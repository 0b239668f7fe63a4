"""The Wan benchmark's results as Markdown: steps, and cold starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine_table import COLUMNS, LEGEND
from benchmarks.record import environment_lines
from benchmarks.rows import Row, target_words

SHOWN = (
    "contender",
    "target",
    "ms",
    "resident ms",
    "peak GiB",
    "weights GiB",
    "streamed GiB",
    "floor ms",
    "x floor",
    "predicted ms",
    "error",
    "replan s",
    "identical",
    "unforeseen",
)
START_COLUMNS = (
    ("contender", "contender"),
    ("first output s", "first_output_seconds"),
    ("first compiled output s", "compiled_output_seconds"),
    ("of it compiling s", "compile_seconds"),
    ("graphs", "graphs"),
    ("units compiled", "compiled"),
    ("sharing a graph", "shared"),
    ("eager", "eager"),
    ("graphs made by replans and later steps", "later_graphs"),
)
START_LEGEND = """\
From the model in host memory, compile caches empty, each contender in a process of its own. resident: moved to the GPU
and compiled block by block. Ours: `offload()`, which packs and pins the weights, discovery, profile and first plan;
with `external` also the eager profile before, and the replan after."""


def markdown(rows: Sequence[Row], starts: Sequence[dict[str, Any]], environment: dict[str, Any], *, name: str) -> str:
    """The whole page."""
    lines = ["# Wan benchmark: a video transformer, compiled and offloaded", "", *environment_lines(environment), ""]
    columns = [(head, show) for head, show in COLUMNS if head in SHOWN]
    for tokens in dict.fromkeys(row.tokens for row in rows if row.tokens):
        lines += [f"## {tokens} tokens", "", _line([head for head, _ in columns]), "|" + "---|" * len(columns)]
        for row in (row for row in rows if row.tokens == tokens):
            if row.step_seconds is None:
                cells = [row.contender, target_words(row.target), row.status] + [""] * (len(columns) - 3)
            else:
                cells = [show(row) for _, show in columns]
            lines.append(_line(cells))
        lines += ["", *(f"![one step](trace-{c}-{tokens}.png)" for c in _drawn(rows, tokens)), ""]
    lines += [f"- {row.contender}: {row.status}" for row in rows if not row.tokens]
    lines += ["## Cold start", "", _line([head for head, _ in START_COLUMNS]), "|" + "---|" * len(START_COLUMNS)]
    lines += [_line([_cell(start[key]) for _, key in START_COLUMNS]) for start in starts]
    return "\n".join([*lines, "", START_LEGEND, "", "## Columns", "", LEGEND])


def _drawn(rows: Sequence[Row], tokens: int) -> list[str]:
    return list(dict.fromkeys(row.contender for row in rows if row.tokens == tokens and row.step_seconds is not None))


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
