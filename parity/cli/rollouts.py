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
    """Rollouts of a real engine: record them, and judge its log-probs against the trainer's."""


@rollouts.command("record")
@click.option("--model", required=True, metavar="DIR|tiny-NAME", help="folder; or tiny-llama, tiny-qwen2, tiny-gemma2")
@click.option("--engine", required=True, metavar="vllm|transformers|URL", help="URL: an OpenAI completions server")
@options.choice("--dtype", None, "fp32", "fp16", "bf16")
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(1.0,), show_default=True)
@click.option("--top-p", "top_ps", type=float, multiple=True, default=(1.0,), show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: the whole vocabulary")
@options.path("--prompts", "a text or a JSON list of ids a line")
@options.count("--rows", "completions", 64)
@options.count("--max-tokens", None, 32)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--name", default=None, help="of the files; default: the model's")
@click.option("--score/--no-score", "scored", default=True, help="store the trainer's log-probs too")
@options.path("--out", default="reports/rollouts")
def record_command(**given: Any) -> None:
    """Sample prompts with an engine and store ids and log-probs, a recording for each temperature and top-p."""
    from parity import recording
    from parity.process import prepare
    from parity.rollouts.record import RecordingOptions, record

    prepare("cpu", 1)
    for path in record(RecordingOptions(**given)):
        click.echo(f"{path}: {recording.load(path).line().partition(': ')[2]}")


@rollouts.command("list")
@click.argument("folder", type=options.PATH, required=False)
def list_command(folder: Path | None) -> None:
    """The recordings in FOLDER (default: those that are shipped), each with where it comes from."""
    from parity import recording

    for path in sorted((folder or rollouts_dir()).glob("*.json")):
        click.echo(recording.load(path).line())


@rollouts.command("judge")
@click.argument("paths", nargs=-1, metavar="[RECORDING…]")
@click.option("--model", default=None, metavar="DIR|tiny-NAME", help="the trainer's; default: that of the recording")
@options.path("--adapter", "a PEFT adapter on the trainer's model")
@options.choice("--support", "of the trainer's log-probs; full is what TRL computes", "truncated", "full")
@options.path("--reports", default="reports")
def judge_command(paths: tuple[str, ...], reports: Path, **given: Any) -> None:
    """An engine's log-probs against the trainer's, in units of the trainer's own noise; without RECORDING the shipped ones.

    Exit code 1 where one disagrees.
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


@rollouts.command("replay")
@click.argument("name", default="gemma2-bf16-t0.7-p0.8")
def replay_command(name: str) -> None:
    """What dropping the importance ratio does to a gradient, on a shipped recording."""
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


@rollouts.command("live")
def live_command() -> None:
    """TRL's GRPOTrainer with the vLLM that is installed: colocated, then with its weight sync off, then served.

    Exit code 1 where a run is not as it should be: with the sync off step 2 must disagree.
    """
    from parity.rollouts import vllm_engine

    vllm_engine.prepare()
    wrong = []
    for what, expected in LIVE.items():  # an engine lives in its process and starts once in it
        code = subprocess.run([sys.executable, "-m", "parity.rollouts.live_run", what]).returncode
        wrong += [] if code == expected else [f"{what} ended with {code}, not {expected}"]
    click.echo("; ".join(wrong) or "as it should be")
    raise SystemExit(1 if wrong else 0)
