"""The Wan benchmark's results as Markdown: steps, and cold starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine_table import COLUMNS, LEGEND
from benchmarks.record import environment_lines
from benchmarks.rows import GIB, Row, target_words
from benchmarks.wan_start import RESIDENT

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
    ("planned s", "planned_seconds"),
    ("x resident", "ratio"),
    ("of it compiling s", "compile_seconds"),
    ("graphs", "graphs"),
    ("units compiled", "compiled"),
    ("sharing a graph", "shared"),
    ("eager", "eager"),
    ("graphs made by replans and later steps", "later_graphs"),
)
START_LEGEND = """\
From the model in host memory, compile caches empty, each contender in a process of its own, after the compiler was
read from disk once and host memory was written to (a virtual machine gets it from its host only then). resident:
moved to the GPU and compiled block by block. Ours: `offload()`, which packs and pins the weights, discovery, profile
and first plan; with `external` also the eager profile before, and the replan after. planned: until the first compiled
step under a plan that knows compiled times is done; of the resident model, until its second step is. x resident: of
these two."""


def markdown(
    rows: Sequence[Row],
    starts: Sequence[dict[str, Any]],
    environment: dict[str, Any],
    settings: dict[str, Any],
    note: str = "",
) -> str:
    """The whole page. note: what else is to be known of this run."""
    mode = f", mode {settings['mode']}" if settings["mode"] else ""
    lines = ["# Wan benchmark: a video transformer, compiled and offloaded", "", *environment_lines(environment)]
    lines += [f"Compiled with {settings['backend']}{mode}; diffusers {settings['diffusers']}."]
    lines += [*([note] if note else []), "", *_link(rows)]
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
    resident = next((start["planned_seconds"] for start in starts if start["contender"] == RESIDENT), None)
    for start in starts:
        ratio = f"{start['planned_seconds'] / resident:.2f}" if resident else ""
        lines.append(_line([_cell({**start, "ratio": ratio}[key]) for _, key in START_COLUMNS]))
    lines += ["", *(f"- {start['contender']}: {_parts(start['parts'])}." for start in starts)]
    return "\n".join([*lines, "", START_LEGEND, "", "## Columns", "", LEGEND])


def _link(rows: Sequence[Row]) -> list[str]:
    links = [row.link_bytes_per_second for row in rows if row.link_bytes_per_second]
    if not links:
        return []
    total = max(row.total_weight_bytes or 0 for row in rows)
    size = f"{total / GIB:.2f} GiB" if total > GIB else f"{total / 2**20:.1f} MiB"
    speed = f"{min(links) / 1e9:.1f} to {max(links) / 1e9:.1f} GB/s"
    return [f"Weights: {size}. Link, pinned host memory to the device, in this run: {speed}.", ""]


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())


def _drawn(rows: Sequence[Row], tokens: int) -> list[str]:
    drawn = [row for row in rows if row.tokens == tokens and row.step_seconds is not None]
    return list(dict.fromkeys(row.contender for row in drawn if not row.contender.endswith("-graph")))


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
