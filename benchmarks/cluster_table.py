"""The cluster benchmark's results as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import environment_lines

GIB = 2**30


def markdown(data: dict[str, Any]) -> str:
    """All sections that there are."""
    settings = data["settings"]
    lines = ["# Cluster benchmark", "", *environment_lines(data["environment"]), ""]
    lines += [f"{settings['workers']} workers, {settings['num_gpus']:g} GPU each, device `{settings['device']}`.", ""]
    failed = [f"- {name}: {status}" for name, status in data["status"].items() if status != "ok"]
    lines += [*failed, ""] if failed else []
    for part in (_scaling, _links, _contention, _replans, _small, _rounds):
        lines += part(data)
    return "\n".join(lines).rstrip() + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _gb(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _scaling(data: dict[str, Any]) -> list[str]:
    if not data["scaling"]:
        return []
    head = [
        "model",
        "budget",
        "workers",
        "steps/s",
        "efficiency",
        "step ms",
        "predicted ms",
        "stall",
        "link GB/s",
        "of alone",
    ]
    head += ["J a step", "streamed GiB"]
    rows = [
        [
            row["model"],
            f"{row['budget']:.0%}",
            str(row["workers"]),
            f"{row['steps_per_second']:.2f}",
            f"{row['efficiency']:.1%}",
            _ms(row["step_seconds"]),
            _ms(row["predicted_step_seconds"]),
            f"{row['stall_share']:.1%}",
            _gb(row["link_bytes_per_second"]),
            _number(row["link_share"], ".0%"),
            _number(row["joules_a_step"]),
            f"{row['streamed_bytes'] / GIB:.3f}",
        ]
        for row in data["scaling"]
    ]
    text = "Step, stall and link are the slowest worker's; the others of the run are up and idle in rows with fewer."
    return ["## 1 to N workers", "", text, "", *_table(head, rows)]


def _links(data: dict[str, Any]) -> list[str]:
    """Each worker's own link: its curves, and plans from solo against plans from joint measurements."""
    found = data.get("links")
    if found is None:
        return []
    head = ["budget", "plan from", "steps/s", "joint over solo", "step ms, each", "predicted ms, each", "off", "stall"]
    head += ["planned for GB/s", "had GB/s", "streamed GiB", "weights GiB"]
    rows = []
    for row in found["plans"]:
        for which, source in (("solo", "solo"), ("joint", "joint"), ("again", "the solo ones again")):
            plan = row[which]

            def each(key: str, form: Callable[[float], str], plan: dict[str, Any] = plan) -> str:
                return ", ".join(form(one[key]) for one in plan["each"])

            rows.append(
                [
                    "latency" if row["budget"] is None else f"{row['budget']:.0%}",
                    source if which == "again" else f"{source} measurements",
                    f"{plan['steps_per_second']:.2f}",
                    f"{row['speedup']:.3f}" if which == "joint" else "",
                    each("step_seconds", _ms),
                    each("predicted_step_seconds", _ms),
                    f"{plan['off']:+.1%}",
                    each("stall_share", "{:.1%}".format),
                    each("planned_link_bytes_per_second", _gb),
                    each("link_bytes_per_second", _gb),
                    each("streamed_bytes", _gib),
                    each("weight_bytes", _gib),
                ]
            )
    verified = found["verified"]
    text = (
        f"Links: {found['link']}. Each worker's plan from what it measured with the others idle (solo), and the plans "
        "from what all measured at once (joint); both run with all at work, the solo ones once more at the end, since "
        "clocks move: joint is over their mean. Off: measured over predicted step, mean. "
        f"All outputs are equal, and the resident model's ({verified['identical']} of {verified['checked']} checked)."
    )
    title = f"## {data['settings']['workers']} workers, a link each: solo against joint measurements"
    return [title, "", text, "", *_table(head, rows), *_curves(found["curves"])]


def _curves(found: Sequence[dict[str, Any]]) -> list[str]:
    sizes = [size for size, _ in found[0]["alone"]]
    head = ["worker", "measured", *(f"{size / 2**20:g} MiB" for size in sizes)]
    ways = {"setup": "at set-up (its profile)", "alone": "alone, others idle", "together": "all at once"}
    rows = []
    for one in found:
        for key, way in ways.items():
            seconds = dict(one[key])
            rates = [_gb(size / seconds[size]) if size in seconds else "-" for size in sizes]
            rows.append([str(one["rank"]), way, *rates])
    return ["Transfer curves, GB/s by the size of a copy:", "", *_table(head, rows)]


def _contention(data: dict[str, Any]) -> list[str]:
    found = data.get("contention")
    if found is None:
        return []
    head = [
        "plan from",
        "steps/s",
        "the other's",
        "step ms",
        "predicted ms",
        "stall",
        "link GB/s",
        "streamed GiB",
        "weights GiB",
    ]
    rows = [
        [
            f"{which} measurements",
            f"{row['steps_per_second']:.2f}",
            f"{row['other_steps_per_second']:.2f}",
            _ms(row["step_seconds"]),
            _ms(row["predicted_step_seconds"]),
            f"{row['stall_share']:.1%}",
            _gb(row["link_bytes_per_second"]),
            f"{row['streamed_bytes'] / GIB:.3f}",
            f"{row['weight_bytes'] / GIB:.3f}",
        ]
        for which, row in (("solo", found["solo"]), ("joint", found["joint"]))
    ]
    alone = _gb(found["alone_link_bytes_per_second"])
    at_setup = ", ".join(map(_gb, found.get("setup_link_bytes_per_second", [])))
    text = (
        f"Shared: {found['shared']}; alone the first worker gets {alone} GB/s (at set-up, each: {at_setup or '-'}). "
        f"Joint over solo: {found['speedup']:.2f} times, the other {found['other_speedup']:.2f} times."
    )
    return [
        "## Two workers, one link: solo against joint measurements (latency mode)",
        "",
        text,
        "",
        *_table(head, rows),
    ]


def _replans(data: dict[str, Any]) -> list[str]:
    found = data.get("replans")
    if found is None:
        return []
    head = ["to", "epoch", "round ms", "stood ms", "pause ms", "step ms", "moved MB", "allowed ms", "recovery ms"]
    rows = [
        [
            one["to"],
            str(one["epoch"]),
            *(_ms(one[key]) for key in ("round_seconds", "parked_seconds", "pause_seconds", "step_before")),
            f"{one['moved_bytes'] / 1e6:.1f}",
            *(_ms(one[key]) for key in ("allowed_seconds", "recovery_seconds")),
        ]
        for one in found["replans"]
    ]
    text = f"{found['items']} items, {len(found['different'])} of them different from a quiet run's. Allowed: one step "
    text += "and the moved bytes (what becomes resident, and what the first step finds in its slots) over the link."
    return ["## Replans under load", "", text, "", *_table(head, rows)]


def _small(data: dict[str, Any]) -> list[str]:
    rows: list[list[str]] = []
    if (verified := data.get("verified")) is not None:
        rows.append(["items as the resident model's, bit for bit", f"{verified['identical']} of {verified['checked']}"])
    if (kill := data.get("kill")) is not None:
        rows.append(["SIGKILL to the worker's next item, s", _number(kill["seconds_to_next_item"])])
        rows.append(
            ["items of that job, different, failed", f"{kill['items']}, {len(kill['different'])}, {kill['failed']}"]
        )
    for one in data.get("memory_by_workers", []):
        text = f"{one['weights_pss_bytes'] / GIB:.3f} of {one['store_bytes'] / GIB:.3f} GiB"
        what = f"{one['model']}: host memory of the weights, workers: {one['workers']}"
        rows.append([what, f"{text}: {one['copies']:.3f} copies"])
    for key, model in (("coordinator", "llama"), ("coordinator_stack", "stack")):
        if (cost := data.get(key)) is not None:
            rows.append(
                [f"{model}: coordinator at 1 s, worker's CPU in its questions", f"{cost['cpu_share']:.2%} of a step"]
            )
            rows.append([f"{model}: coordinator's own CPU", f"{cost['coordinator_cpu_share']:.2%} of a core"])
    if (found := data.get("simulated")) is not None:
        text = f"{found['seconds']:.2f} s, {found['slowest_solve_seconds']:.2f} s of it the planner, "
        text += f"{found['coordinator_cpu_seconds']:.2f} s CPU; with Ray's calls {found['seconds_with_ray']:.2f} s"
        who = f"{found['gpus']} simulated GPUs with {found['workers']} workers"
        rows.append([f"joint replan of {who}", text])
    return ["## Figures", "", *_table(["what", "measured"], rows)] if rows else []


def _rounds(data: dict[str, Any]) -> list[str]:
    if not data.get("rounds"):
        return []
    head = ["light actors", "cores", "median ms", "p90 ms", "most ms"]
    rows = [
        [
            str(one["actors"]),
            str(one["cores"]),
            *(_ms(one[key]) for key in ("median_seconds", "p90_seconds", "most_seconds")),
        ]
        for one in data["rounds"]
    ]
    return ["## Prepare and commit", "", *_table(head, rows)]


def picture(data: dict[str, Any], path: Path) -> None:
    """Throughput over workers, a panel a model, a line a budget; and the contention's two bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in data["scaling"]))
    contention = data.get("contention")
    panels = len(models) + (contention is not None)
    if not panels:
        return
    figure = Figure(figsize=(4.6 * panels + 0.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for at, model in enumerate(models):
        axes = figure.add_subplot(1, panels, at + 1)
        for budget in dict.fromkeys(row["budget"] for row in data["scaling"]):
            rows = [row for row in data["scaling"] if row["model"] == model and row["budget"] == budget]
            counts = [row["workers"] for row in rows]
            (line,) = axes.plot(
                counts, [row["steps_per_second"] for row in rows], "o-", label=f"{budget:.0%} on the GPU"
            )
            if rows:
                first = rows[0]["steps_per_second"]
                axes.plot(counts, [first * count for count in counts], ":", color=line.get_color(), lw=1)
        axes.set_title(model)
        axes.set_xlabel("workers (dotted: ideal)")
        axes.set_xticks(sorted({row["workers"] for row in data["scaling"]}))
        axes.set_ylabel("steps/s, all workers")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    if contention is not None:
        axes = figure.add_subplot(1, panels, panels)
        which = ("solo", "joint")
        steps = [contention[name]["step_seconds"] * 1e3 for name in which]
        stalls = [contention[name]["stall_seconds"] * 1e3 for name in which]
        axes.bar(which, steps, color="#66a182", label="step")
        axes.bar(which, stalls, color="#d1495b", label="of it stall", width=0.5)
        axes.set_title("two workers, one link: plan from")
        axes.set_ylabel("ms a step")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
