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


ABOVE_FLOOR, PREDICTION, LOADER = 1.01, 0.03, 20e-6
"""What a row of ours is to keep to: times its floor, the prediction's error, the loader's host time a unit."""


def _where_it_goes(rows: Sequence[Row]) -> list[str]:
    """For each row of ours that misses a mark: where the time goes."""
    notes = []
    for row in rows:
        parts = [*_above_floor(row), *_wrong_prediction(row), *_slow_loader(row)]
        if parts:
            notes.append(f"- {row.contender}, {target_words(row.target)}: " + "; ".join(parts) + ".")
    head = "Rows over 1% above their floor, predicted with more than 3% of error, or whose loader takes over 20 us:"
    return [head, "", *notes] if notes else []


def _above_floor(row: Row) -> list[str]:
    if row.ratio is None or row.ratio <= ABOVE_FLOOR or not row.step_seconds or row.floor_seconds is None:
        return []
    above = row.step_seconds - row.floor_seconds
    parts = [f"{above * 1e3:.2f} ms above the floor"]
    if row.transfer_seconds is None or row.compute_seconds is None or row.stall_seconds is None:
        return parts
    if row.resident_seconds is not None and row.floor_seconds > row.resident_seconds:
        slower, idle = row.transfer_seconds - row.floor_seconds, row.step_seconds - row.transfer_seconds
        parts.append(f"copies beside compute {slower * 1e3:+.2f} ms, the link idle {idle * 1e3:+.2f} ms")
    else:
        rest = row.step_seconds - row.compute_seconds - row.stall_seconds
        compute = row.compute_seconds + rest - row.floor_seconds
        parts.append(
            f"waiting for copies {row.stall_seconds * 1e3:+.2f} ms, the units' compute and what is between them "
            f"{compute * 1e3:+.2f} ms against the resident step ({rest * 1e3:.2f} ms between them)"
        )
    if row.sm_clock_hz and row.resident_sm_clock_hz:
        clocks = f"{row.sm_clock_hz / 1e6:.0f} and {row.resident_sm_clock_hz / 1e6:.0f} MHz"
        parts.append(f"SM clock at the end of the block and of the resident one {clocks}")
    return parts


def _wrong_prediction(row: Row) -> list[str]:
    if row.prediction_error is None or abs(row.prediction_error) <= PREDICTION or not row.step_seconds:
        return []
    off = row.prediction_error * row.step_seconds
    parts = [f"predicted {off * 1e3:+.2f} ms"]
    if row.predicted_transfer_seconds is not None and row.transfer_seconds is not None:
        copies = row.predicted_transfer_seconds - row.transfer_seconds
        stalls = (row.predicted_stall_seconds or 0.0) - (row.stall_seconds or 0.0)
        parts.append(f"of it stalls {stalls * 1e3:+.2f} ms, compute and the rest {(off - stalls) * 1e3:+.2f} ms")
        parts.append(f"copies were predicted {copies * 1e3:+.2f} ms")
    return [", ".join(parts)]


def _slow_loader(row: Row) -> list[str]:
    if row.loader_seconds_a_unit is None or row.loader_seconds_a_unit <= LOADER:
        return []
    return [
        f"the loader takes {row.loader_seconds_a_unit * 1e6:.1f} us with {row.copies_a_visit or 0:.1f} copies a visit"
    ]


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
max(resident, streamed / link). ideal: max(resident, (all weights - budget) / link), which no slots at all would reach:
what lies between the two is the slots' share of the weights on the GPU, which is streamed beside what does not fit.
predicted: from steps under the plan before, a second of them, and then the plan is put in force; live error: of the
prediction from compute and copies under the plan itself, as the report gives it once steps have settled.
set-up: from the model in host memory to the first planned step. replan: solving, moving and the first step under the
new plan. identical: equal to the resident model's output, bit for bit (else the largest difference). host: host time
of everything that offloading adds to a unit's call, without the model's own work between; loader: of the loader alone,
within the model's steps. Each is of one step, the device idle before it and the host busy.
"""
