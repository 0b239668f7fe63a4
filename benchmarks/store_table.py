"""The store benchmark's results as Markdown and as a picture."""

from __future__ import annotations

import statistics
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
        *([f"Load of the machine: {data['load'][0]:.1f} before, {data['load'][1]:.1f} after."] if data["load"] else []),
        *filter(None, [data.get("note", "")]),
        "",
        "## Host memory for weights, in copies of the weights (PSS)",
        "",
        "| processes | shared store | while filling | a copy a process | while filling |",
        "|---|---|---|---|---|",
    ]
    for count in dict.fromkeys(row["processes"] for row in data["memory"]):
        cells = []
        for kind in ("shared", "private"):
            row = next((r for r in data["memory"] if r["kind"] == kind and r["processes"] == count), None)
            if row is None or row["copies"] is None:
                cells += ["not measured" if row is None else "no room", ""]
            else:
                cells += [f"{row['copies']:.3f}", f"{row['copies_while_filling']:.3f}"]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "While filling: what the tmpfs takes and the processes' own anonymous memory, the most of many looks. (PSS of",
        "several processes cannot be read at one moment, and pages change hands meanwhile.)",
    ]
    lines += ["", "## Starts: seconds from the call to the end of the first planned step, imports apart", ""]
    lines += [
        f"The best of {len(data['starts'])} rounds; warm-up is discovery, profiling and the plan on the device.",
        "Pinning runs beside the filling: what it takes, and what was left of it after the filling.",
        "",
        "| start | to the first planned step | hashing | waiting | filling | of it reserving | pinning | of it "
        "after the filling | warm-up | (imports) | all rounds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, start in best_starts(data).items():
        keys = ("identity_seconds", "wait_seconds", "fill_seconds", "reserve_seconds")
        parts = [f"{start[key]:.2f}" for key in keys]
        pins = (start["pin_seconds"], start["pin_waited_seconds"])
        parts += ["no GPU" if seconds is None else f"{seconds:.2f}" for seconds in pins]
        parts += [f"{sum(start['step_seconds']):.2f}", f"{start['import_seconds']:.2f}"]
        every = ", ".join(f"{turn[name]['seconds']:.2f}" for turn in data["starts"])
        lines.append(f"| {name} | {start['seconds']:.2f} | " + " | ".join(parts) + f" | {every} |")
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


def best_starts(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The quickest of each kind of start."""
    return {
        name: min((turn[name] for turn in data["starts"]), key=lambda start: start["seconds"])
        for name in data["starts"][0]
    }


def _fill_lines(data: dict[str, Any]) -> list[str]:
    threads, speeds = data["threads"], data["speeds"]
    names = {
        "memcpy_one_thread": "memcpy, 1 thread, memory touched before",
        "memcpy_all_threads": f"memcpy, {threads} threads, memory touched before",
        "memcpy_fresh_pages": f"memcpy, {threads} threads, into a new file on the tmpfs as it is mapped",
        "memcpy_reserved_pages": f"memcpy, {threads} threads, into a new file whose pages are got as a store's are",
        "fill": f"filling, {threads} threads: pages got from the kernel, read, checked",
        "fill_after_reserving": "filling without getting the pages",
    }
    best = {name: max(speeds[name]) for name in names}
    lines = [
        f"GB/s, the best of {len(speeds['fill'])} rounds in which each ran in turn, and their median. A new file's "
        "pages come from the kernel cleared; filling asks for huge ones.",
        "",
        f"| | GB/s | median | of memcpy, 1 thread | {threads} threads | into a new file | pages got as a store's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, words in names.items():
        shares = [best[name] / best[key] for key in names if key.startswith("memcpy")]
        lines.append(
            f"| {words} | {best[name] / 1e9:.1f} | {statistics.median(speeds[name]) / 1e9:.1f} | "
            + " | ".join(f"{share:.0%}" for share in shares)
            + " |"
        )
    huge = {start["huge_pages"] for turn in data["starts"] for start in turn.values()}
    return [*lines, "", f"In huge pages: {', '.join(sorted(huge))}."]


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
    starts = best_starts(data)
    names = list(starts)
    for row, start in enumerate(starts.values()):
        warm_up = sum(start["step_seconds"])
        parts = {
            "hashing": (start["identity_seconds"], GREY),
            "waiting": (start["wait_seconds"], "#edae49"),
            "filling": (start["fill_seconds"], SHARED),
            "pinning": (start["pin_waited_seconds"] or 0.0, "#1f77b4"),
            "warm-up": (warm_up, "#9bc1bc"),
        }
        parts["rest"] = (max(0.0, start["seconds"] - sum(seconds for seconds, _ in parts.values())), "#dddddd")
        at = 0.0
        for label, (seconds, colour) in parts.items():
            right.barh(row, seconds, left=at, color=colour, label=label if row == 0 else None)
            at += seconds
        right.text(at, row, f" {at:.2f} s", va="center", fontsize=8)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.margins(x=0.15)
    right.set_xlabel(f"seconds to the first planned step, {data['weight_bytes'] / GIB:.1f} GiB from page cache")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)
