"""`--dry-run`: what a run would take, from one measured step. Trains nothing.

The token cache is made, because the rows are counted in it; the run itself will find it there.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from cache.json_file import read_json, write_json
from flows.errors import BadParameter
from flows.prepare import prepare_run
from flows.runs.directory import Tree, in_use
from flows.runs.parameters import Parameters, resolve_home
from flows.show.progress import console, duration, progress_line
from flows.stage.process import run_stage


def dry_run(function: Callable[..., Any], arguments: dict[str, Any]) -> int:
    """Prints the plan; 0 when it fits, 1 when it does not."""
    if not {"name", "rows", "target", "training"} <= arguments.keys():
        raise BadParameter(f"{function.__name__} trains nothing, so there is nothing to try with --dry-run.")
    parameters, tokens = prepare_run(Parameters(**{name: given for name, given in arguments.items() if name != "dask"}))
    runs = resolve_home(parameters.home) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs, prefix=".dry-run-") as directory:
        run = Path(directory)
        write_json(run / "config.json", parameters.model_dump(mode="json"))
        with in_use(run), progress_line("check") as line:
            run_stage("check", ["check", str(run), "--tokens", str(tokens)], run, line.show)
        plan = read_json(run / "plan.json")
    assert plan is not None, "a check that succeeded leaves plan.json"
    console.print(_table(parameters, plan))
    for refusal in plan["refusals"]:
        console.print(f"Cannot fit: {refusal}", markup=False)
    return 0 if plan["fits"] else 1


def _table(parameters: Parameters, plan: Tree) -> Table:
    table = Table(title=f"Plan of {parameters.name}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("rows", f"{plan['rows']:,} to train on, {plan['held_out_rows']:,} held out")
    table.add_row("steps", f"{plan['steps']:,}: {plan['steps_per_epoch']:,} an epoch, {plan['epochs']} epochs")
    disk: dict[str, int] = plan["disk_bytes"]
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in disk.items() if size)
    total, free = gigabytes(sum(disk.values())), gigabytes(plan["free_disk_bytes"])
    table.add_row("disk", f"{total} ({parts}) of {free} free")
    for device, needed in plan["memory_bytes"].items():
        available = gigabytes(plan["available_memory_bytes"][device])
        table.add_row("memory" if device == "memory" else f"memory of {device}", f"{gigabytes(needed)} of {available}")
    for layout in plan["layouts"][: 3 if plan["gpus"] > 1 else 0]:
        idle = f"targets {layout['target_idle']:.0%} idle, drafters {layout['drafter_idle']:.0%}"
        table.add_row("layout", f"{layout['layout']}: {duration(layout['seconds'])}, {idle}")
    table.add_row("processes", f"{plan['processes']}, passes of at most {plan['pass_slots']:,} slots")
    step = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in plan["step_seconds"].items())
    table.add_row(
        "time",
        f"a step on one device: {step}, measured; {duration(plan['seconds_total'])} to the end of the last epoch",
    )
    return table


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
