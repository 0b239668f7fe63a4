"""The store benchmark's results as Markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import environment_lines

GIB = 2**30
SHARED, PRIVATE, GREY = "#0b6e4f", "#d1495b", "#444444"


def markdown(data: dict[str, Any]) -> str:
    """The whole page."""
    lines = [
        "# Host store benchmark",
        "",
        *environment_lines(data["environment"]),
        f"Weights: {data['weight_bytes'] / GIB:.2f} GiB, bfloat16, in the page cache; {data['threads']} threads fill.",
        "",
        "## Host memory for weights, in copies of the weights (PSS)",
        "",
        "| processes | shared store | while filling | a copy a process | while filling |",
        "|---|---|---|---|---|",
    ]
    for count in dict.fromkeys(row["processes"] for row in data["memory"]):
        cells = []
        for kind in ("shared", "private"):
            row = next(r for r in data["memory"] if r["kind"] == kind and r["processes"] == count)
            known = row["copies"] is not None
            cells += [f"{row['copies']:.3f}", f"{row['copies_while_filling']:.3f}"] if known else ["no room", ""]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    lines += ["", "## Starts: seconds from the call to the weights, imports apart", ""]
    lines += [
        "| start | to the weights | and pinned | hashing | waiting | filling | of it reserving | (imports) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, start in data["starts"].items():
        pinned = f"{start['seconds_pinned']:.2f}" if start["pin_seconds"] is not None else "no GPU"
        keys = ("identity_seconds", "wait_seconds", "fill_seconds", "reserve_seconds", "import_seconds")
        parts = [f"{start[key]:.2f}" for key in keys]
        lines.append(f"| {name} | {start['seconds']:.2f} | {pinned} | " + " | ".join(parts) + " |")
    lines += ["", "## Filling from page cache, checksums included", "", *_fill_lines(data)]
    if data["link"]:
        lines += ["", "## Link to the GPU", "", *_link_lines(data["link"])]
    if data["crashes"]:
        crashes = data["crashes"]
        lines += [
            "",
            "## Random deaths",
            "",
            f"{crashes['rounds']} rounds, {crashes['started']} processes started, {crashes['killed']} killed: "
            f"{crashes['wrong']} wrong weights, {crashes['stuck']} stuck starts, {crashes['leaked']} leaked stores.",
        ]
    return "\n".join(lines) + "\n"


def _fill_lines(data: dict[str, Any]) -> list[str]:
    one, every = data["memcpy_one_thread"], data["memcpy_all_threads"]
    rows = [
        ("memcpy, one thread", one),
        (f"memcpy, {data['threads']} threads", every),
        ("filling, getting the pages from the kernel included", data["fill"]),
        ("filling alone", data["fill_after_reserving"]),
    ]
    lines = ["| | GB/s | of one thread's memcpy | of all threads' |", "|---|---|---|---|"]
    return lines + [f"| {name} | {rate / 1e9:.1f} | {rate / one:.0%} | {rate / every:.0%} |" for name, rate in rows]


def _link_lines(link: dict[str, Any]) -> list[str]:
    if "store" not in link:
        return [f"Not pinned: {link['reason']}. Pageable: {link['pageable'] / 1e9:.1f} GB/s."]
    return [
        "| from | GB/s |",
        "|---|---|",
        f"| the store, pinned in place | {link['store'] / 1e9:.2f} |",
        f"| torch's own pinned memory | {link['torch_pinned'] / 1e9:.2f} |",
        f"| the store, pageable | {link['pageable'] / 1e9:.2f} |",
        "",
        f"Ratio {link['ratio']:.4f}. Pinning {link['pinned_bytes'] / GIB:.2f} GiB took {link['pin_seconds']:.2f} s in "
        f"{link['pin_chunks']} chunks.",
    ]


def picture(data: dict[str, Any], path: Path) -> None:
    """Copies of the weights over the number of processes, and the seconds of each kind of start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for kind, colour, label in (("shared", SHARED, "shared store"), ("private", PRIVATE, "a copy a process")):
        rows = [row for row in data["memory"] if row["kind"] == kind and row["copies"] is not None]
        left.plot([r["processes"] for r in rows], [r["copies"] for r in rows], "o-", color=colour, label=label)
    left.set(xlabel="processes", ylabel="copies of the weights in host memory (PSS)", ylim=(0, None))
    left.legend()
    names = list(data["starts"])
    for row, name in enumerate(names):
        start = data["starts"][name]
        at = 0.0
        parts = [
            ("hashing", "identity_seconds", GREY),
            ("waiting", "wait_seconds", "#edae49"),
            ("filling", "fill_seconds", SHARED),
        ]
        for label, key, colour in [*parts, ("pinning", "pin_seconds", "#1f77b4")]:
            seconds = start[key] or 0.0
            right.barh(row, seconds, left=at, color=colour, label=label if row == 0 else None)
            at += seconds
        right.text(at, row, f" {at:.2f} s", va="center", fontsize=8)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set_xlabel(f"seconds to {data['weight_bytes'] / GIB:.1f} GiB of weights, from page cache")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)
