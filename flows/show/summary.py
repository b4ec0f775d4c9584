"""What a run came to, as a table and as summary.json: read from its stages' results, so a rerun shows the same."""

from pathlib import Path
from typing import Any

from rich.table import Table

from cache.disk.store import TokenCache
from cache.json_file import read_json, write_json
from flows.runs.directory import Tree
from flows.runs.ledger import seconds_by_stage
from flows.runs.parameters import Parameters
from flows.show.artifacts import reporting
from flows.show.progress import console
from flows.show.tables import busy_by_stage, number, report_markdown, served_line, stage_seconds, tau_change, with_error


def summarise(parameters: Parameters, tokens: Path, served: Tree | None) -> Tree:
    """Writes summary.json, prints the table, and returns what both say."""
    summary = summary_of(parameters, tokens, served)
    write_json(parameters.run_directory / "summary.json", summary)
    with reporting(parameters.name, "report") as reporter:
        samples = _result(parameters.run_directory, "evaluation").get("samples", [])
        reporter.markdown("report", lambda: report_markdown(_lines(summary), samples), f"report of {parameters.name}")
    console.print(summary_table(summary))
    for note in notes(summary):
        console.print(note)
    return summary


def outcome(summary: Tree) -> str:
    """`loss 3.812, τ 1.008 → 1.312`: the state's message."""
    return f"loss {number(summary['loss'])}, {tau_change(**summary['tau'])}"


def summary_of(parameters: Parameters, tokens: Path, served: Tree | None) -> Tree:
    run = parameters.run_directory
    manifest = TokenCache.open(tokens).manifest
    trained, evaluation, exported = (_result(run, stage) for stage in ("train", "evaluation", "export"))
    tau = {when: evaluation["tau"][when] for when in ("before", "after")}
    return {
        "name": parameters.name,
        "run": str(run),
        "token_cache": str(tokens),
        "rows": manifest.rows,
        "rows_read": manifest.source_rows,
        "tokens": manifest.tokens,
        "supervised_tokens": manifest.supervised_tokens,
        "dropped": manifest.dropped,
        "truncated": manifest.truncated,
        "seconds": seconds_by_stage(run),
        "epochs": trained["epochs_done"],
        "steps": trained["steps"],
        "loss_first": trained["loss_first"],
        "loss": trained["loss"],
        "trained_tokens": trained["tokens"],
        "tokens_per_s": trained["tokens_per_s"],
        "busy": busy_by_stage(trained),
        "bottleneck": trained["bottleneck"],
        "tau": {when: value and value["value"] for when, value in tau.items()},
        "tau_se": {when: value and value["se"] for when, value in tau.items()},
        "tau_convention": evaluation["tau"].get("convention"),
        "decode": evaluation["decode"],
        "lossless": evaluation["decode"]["lossless"],
        "report": str(run / "report.html"),
        "export": exported["path"],
        "max_logit_difference": exported["max_logit_difference"],
        "served": served,
    }


def _result(run: Path, stage: str) -> Tree:
    result = read_json(run / f"{stage}.json")
    assert result is not None, f"{stage}.json is there once its stage has finished"
    return result


def summary_table(summary: Tree) -> Table:
    table = Table(title=f"Run {summary['name']}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in _lines(summary).items():
        table.add_row(what, value)
    return table


def _lines(summary: Tree) -> dict[str, str]:
    decode: dict[str, Any] = summary["decode"]
    tau = {when: with_error({"value": value, "se": summary["tau_se"][when]}) for when, value in summary["tau"].items()}
    before = "" if summary["tau"]["before"] is None else f"{tau['before']} before, "
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in summary["dropped"].items() if count) or "none"
    busy = ", ".join(f"{stage} {share:.0%}" for stage, share in summary["busy"].items())
    speed = number(summary["tokens_per_s"])
    rows = f"{summary['rows']:,} of {summary['rows_read']:,} read"
    return {
        "rows": f"{rows}; dropped: {dropped}; cut: {summary['truncated']:,}",
        "tokens": f"{summary['tokens']:,}, of which {summary['supervised_tokens']:,} supervised",
        "time": stage_seconds(summary["seconds"]),
        "trained": f"{summary['epochs']} epochs, {summary['steps']:,} steps, {speed} tokens/s",
        "busy": f"{busy}. {summary['bottleneck']}",
        "loss": f"{number(summary['loss_first'])} → {number(summary['loss'])}",
        "τ held out": f"{before}{tau['after']} after training (teacher-forced)",
        "lossless": _lossless(decode),
        "decoding": f"τ {number(decode['tau'])}; {decode['plain_tokens_per_s']:.1f} tokens/s plain, "
        f"{decode['speculative_tokens_per_s']:.1f} speculative ({decode['speedup']:.2f}×)",
        **({"served": served_line(summary["served"])} if summary["served"] else {}),
        "report": summary["report"],
        "export": summary["export"],
    }


def _lossless(decode: Tree) -> str:
    if decode["lossless"] is None:
        return "not compared: two draws need not agree at a temperature above 0"
    near_ties = f", {decode['near_ties']} up to a near tie of the target" if decode["near_ties"] else ""
    texts = f"{decode['identical']} of {decode['prompts']} prompts × {decode['max_new_tokens']} tokens identical"
    return f"{'yes' if decode['lossless'] else 'NO'}: {texts} to the target's own greedy text{near_ties}"


def notes(summary: Tree) -> list[str]:
    if summary["decode"]["speedup"] >= 1:
        return []
    return [
        f"Here a round costs as much as {summary['decode']['cost']['break_even_tau']:.2f} tokens decoded one by one, "
        "so a drafter makes decoding faster here from that τ on. The README says how a real run differs."
    ]
