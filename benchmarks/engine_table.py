"""The engine benchmark's rows as Markdown: a table a token count, and where the lost time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.record import environment_lines
from benchmarks.rows import GIB, Row, target_words

Column = tuple[str, Callable[[Row], str]]


def markdown(rows: Sequence[Row], environment: dict[str, Any], note: str = "") -> str:
    """The whole page. note: what else is to be known of this run."""
    lines = ["# Engine benchmark", "", *environment_lines(environment), *([note] if note else []), ""]
    links = [row.link_bytes_per_second for row in rows if row.link_bytes_per_second]
    if links:
        lines += [
            f"Link, pinned host memory to GPU, in this run: {min(links) / 1e9:.1f} to {max(links) / 1e9:.1f} GB/s.",
            "",
        ]
    for tokens in dict.fromkeys(row.tokens for row in rows):
        some = [row for row in rows if row.tokens == tokens]
        lines += [f"## {tokens} tokens", "", *_table(some), "", *_where_it_goes(some), ""]
    lines += [LEGEND]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        if row.step_seconds is None:
            cells = [row.contender, target_words(row.target), row.status] + [""] * (len(COLUMNS) - 3)
        else:
            cells = [show(row) for _, show in COLUMNS]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return lines


def _where_it_goes(rows: Sequence[Row]) -> list[str]:
    """For each row of ours over 1.01 of its floor: what the step consists of, and so where the rest went."""
    notes = []
    for row in rows:
        if row.ratio is None or row.ratio <= 1.01 or not row.step_seconds or row.floor_seconds is None:
            continue
        parts = [f"{(row.step_seconds - row.floor_seconds) * 1e3:.2f} ms above the floor"]
        if row.compute_seconds is not None and row.stall_seconds is not None and row.resident_seconds:
            parts.append(f"waiting for copies {row.stall_seconds * 1e3:.2f} ms")
            slower = row.compute_seconds - row.resident_seconds
            parts.append(f"the units' compute {slower * 1e3:+.2f} ms against the resident step")
        if row.transfer_seconds and row.streamed_bytes:
            rate = row.streamed_bytes / row.transfer_seconds
            parts.append(f"copies at {rate / 1e9:.1f} GB/s while on the link")
            if row.predicted_transfer_seconds and row.predicted_stall_seconds is not None:
                copies = row.transfer_seconds - row.predicted_transfer_seconds
                stalls = (row.stall_seconds or 0.0) - row.predicted_stall_seconds
                parts.append(f"against the plan: copies {copies * 1e3:+.2f} ms, stalls {stalls * 1e3:+.2f} ms")
        if row.sm_clock_hz and row.resident_sm_clock_hz:
            clocks = f"{row.sm_clock_hz / 1e6:.0f} and {row.resident_sm_clock_hz / 1e6:.0f} MHz"
            parts.append(f"SM clock at the end of the block and of the resident one {clocks}")
        notes.append(f"- {row.contender}, {target_words(row.target)}: " + "; ".join(parts) + ".")
    return ["Rows more than 1% above their floor (of one sampled step, medians):", "", *notes] if notes else []


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.2f}"


def _gib(value: int | None) -> str:
    return "" if value is None else (f"{value / GIB:.2f}" if value > GIB / 20 else f"{value / 2**20:.1f} MiB")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _same(row: Row) -> str:
    if row.identical is None:
        return ""
    return "yes" if row.identical else f"no ({row.largest_difference:.2g})"


def _name(row: Row) -> str:
    extra = row.status.removeprefix("ok").strip("; ")
    return row.contender + (f" ({extra})" if extra else "")


COLUMNS: tuple[Column, ...] = (
    ("contender", _name),
    ("target", lambda row: target_words(row.target)),
    ("ms", lambda row: _ms(row.step_seconds)),
    ("resident ms", lambda row: _ms(row.resident_seconds)),
    ("peak GiB", lambda row: _gib(row.peak_bytes)),
    ("weights GiB", lambda row: _gib(row.device_weight_bytes)),
    ("streamed GiB", lambda row: _gib(row.streamed_bytes)),
    ("floor ms", lambda row: _ms(row.floor_seconds)),
    ("x floor", lambda row: _number(row.ratio, ".3f")),
    ("x ideal", lambda row: _number(row.ratio_to_ideal, ".3f")),
    ("predicted ms", lambda row: _ms(row.predicted_seconds)),
    ("error", lambda row: _number(row.prediction_error, "+.1%")),
    ("live error", lambda row: _number(row.prediction_live_error, "+.1%")),
    ("set-up s", lambda row: _number(row.setup_seconds, ".1f")),
    ("replan s", lambda row: _number(row.replan_seconds, ".2f")),
    ("identical", _same),
    ("unforeseen", lambda row: _number(row.unforeseen_visits, "d")),
    ("host us a unit", lambda row: _number(row.host_seconds_a_unit and row.host_seconds_a_unit * 1e6, ".1f")),
    ("loader us", lambda row: _number(row.loader_seconds_a_unit and row.loader_seconds_a_unit * 1e6, ".1f")),
)

LEGEND = """\
ms: a forward, back to back, the median over repeats. resident: the un-offloaded model in the same process, in blocks
before and after each timed block (where the link decides: the last one before). Each block comes after a second of the
same work, which settles the clocks. peak: GPU memory of the whole forward (`torch.cuda.max_memory_allocated`). floor:
max(resident, streamed / link). ideal: max(resident, (all weights - budget) / link), which no slots at all would reach.
predicted: from steps under the plan before, a second of them, and then the plan is put in force; live error: of the
prediction from compute and copies under the plan itself, as the report gives it once steps have settled.
set-up: from the model in host memory to the first planned step. replan: solving, moving and the first step under the
new plan. identical: equal to the resident model's output, bit for bit (else the largest difference). host: host time
of everything that offloading adds to a unit's call, without the model's own work between; loader: of the loader alone,
within the model's steps. Each is of the second of two steps, the device idle before the first.
"""
