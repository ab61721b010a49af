"""`parity rollouts`: record what an engine samples, list what was recorded, judge it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from parity.cli import options
from parity.data import rollouts_dir


@click.group("rollouts")
def rollouts() -> None:
    """Compare log-probs of a real engine with the trainer's."""


@rollouts.command("record", epilog="Example: parity rollouts record --model tiny-llama --engine transformers")
@click.option(
    "--model", required=True, metavar="DIR|tiny-NAME", help="a folder, or tiny-llama, tiny-qwen2, tiny-gemma2"
)
@click.option("--engine", required=True, metavar="vllm|transformers|URL", help="URL: an OpenAI completions server")
@options.choice("--dtype", None, "fp32", "fp16", "bf16")
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(1.0,), show_default=True)
@click.option("--top-p", "top_ps", type=float, multiple=True, default=(1.0,), show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: the whole vocabulary")
@options.path("--prompts", "file: on each line a text, or a JSON list of token ids")
@options.count("--rows", "completions", 64)
@options.count("--max-tokens", None, 32)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--name", default=None, help="name of the files; default: the model's")
@click.option("--score/--no-score", "scored", default=True, help="store the trainer's log-probs too")
@options.path("--out", default="reports/rollouts")
def record_command(**given: Any) -> None:
    """Sample with an engine, store ids and log-probs.

    Writes one recording for each temperature and top-p.
    """
    from parity import recording
    from parity.process import prepare
    from parity.rollouts.record import RecordingOptions, record

    prepare("cpu", 1)
    for path in record(RecordingOptions(**given)):
        click.echo(f"{path}: {recording.load(path).line().partition(': ')[2]}")


@rollouts.command("list", epilog="Example: parity rollouts list")
@click.argument("folder", type=options.PATH, required=False)
def list_command(folder: Path | None) -> None:
    """List recordings and where they come from.

    Without FOLDER: those that are shipped.
    """
    from parity import recording

    for path in sorted((folder or rollouts_dir()).glob("*.json")):
        click.echo(recording.load(path).line())


@rollouts.command("judge", epilog="Example: parity rollouts judge reports/rollouts/tiny-llama.json")
@click.argument("paths", nargs=-1, metavar="[RECORDING…]")
@click.option(
    "--model", default=None, metavar="DIR|tiny-NAME", help="the trainer's model; default: that of the recording"
)
@options.path("--adapter", "a PEFT adapter on the trainer's model")
@options.choice("--support", "tokens over which the trainer normalises; TRL: full", "truncated", "full")
@options.path("--reports", default="reports")
def judge_command(paths: tuple[str, ...], reports: Path, **given: Any) -> None:
    """Judge an engine's log-probs against the trainer's.

    The unit is the trainer's own rounding noise. Without RECORDING: those that are shipped. Exit code 1 if one disagrees.
    """
    from parity.process import prepare

    prepare("cpu", 1)
    from parity import recording
    from parity.rollouts import report
    from parity.rollouts.judge import judged

    found = []
    for path in paths or [str(rollouts_dir() / name) for name in recording.shipped()]:
        one = recording.load(path)
        found.append((one, judged(one, **given)))
        click.echo(report.text(*found[-1]))
    report.write(found, reports / "rollouts.html")
    click.echo(f"{report.CPU_ONLY} Pictures in {reports / 'rollouts.html'}.")
    raise SystemExit(0 if all(verdict.agrees for _, verdict in found) else 1)


@rollouts.command("replay", epilog="Example: parity rollouts replay")
@click.argument("name", default="gemma2-bf16-t0.7-p0.8")
def replay_command(name: str) -> None:
    """Show what ignoring the importance ratio does.

    Computes the gradient of a shipped recording with the ratio and without it.
    """
    from parity.process import prepare

    prepare("cpu", 1)
    from parity import recording
    from parity.rollouts.dropped import dropped

    one = recording.named(name)
    click.echo(one.line())
    for found in dropped(one):
        click.echo(f"  {found.line()}")


LIVE = {"colocate": 0, "colocate-no-sync": 1, "server": 0}
"""Live run -> exit code that it should end with."""


@rollouts.command("live", epilog="Example: parity rollouts live")
def live_command() -> None:
    """Run TRL's GRPOTrainer with the installed vLLM.

    Three runs: colocated, colocated without weight sync, and as a server. Without the sync, step 2 must disagree. Exit
    code 1 if a run does not end as it should.
    """
    from parity.rollouts import vllm_engine

    vllm_engine.prepare()
    wrong = []
    for what, expected in LIVE.items():  # an engine lives in its process and starts once in it
        code = subprocess.run([sys.executable, "-m", "parity.rollouts.live_run", what]).returncode
        wrong += [] if code == expected else [f"{what} ended with {code}, not {expected}"]
    click.echo("; ".join(wrong) or "as it should be")
    raise SystemExit(1 if wrong else 0)
