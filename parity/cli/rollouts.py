"""`parity rollouts`: record what an engine samples, judge it."""

from typing import Any

import click

from parity.cli import options
from parity.cli.group import Commands
from parity.data import rollouts_dir
from parity.process import prepare


@click.group("rollouts", cls=Commands)
def rollouts() -> None:
    """Compare log-probs of a real engine with the trainer's."""


@rollouts.command("record", epilog="Example: parity rollouts record --model tiny-llama --engine transformers")
@click.option("--model", required=True, metavar="DIR|tiny-NAME", help="folder, or tiny-llama, tiny-qwen2, tiny-gemma2")
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
@click.option("--contract", is_flag=True, help="also test the engine with top-k, other orders, batch sizes, its cache")
@options.path("--push", "move each weight, save the model in this new folder, push it to vLLM as TRL does, then record")
@options.path("--adapter", "a PEFT adapter on the model that is pushed")
@click.option("--sleep", is_flag=True, help="vLLM's weights are 0 before: vllm_enable_sleep_mode loses them")
@options.path("--out", default="reports/rollouts")
def record_command(**given: Any) -> None:
    """Sample with an engine, store ids and log-probs.

    Writes one recording for each temperature and top-p.
    """
    from parity import recording
    from parity.rollouts.record import RecordingOptions, record

    prepare("cpu")
    for path in record(RecordingOptions(**given)):
        click.echo(f"{path}: {recording.load(path).line().partition(': ')[2]}")


@rollouts.command("judge", epilog="Example: parity rollouts judge reports/rollouts/llama-fp32-t1-p1.json")
@click.argument("paths", nargs=-1, metavar="[RECORDING…]")
@options.option("--model", "the trainer's model; default: that of the recording", metavar="DIR|tiny-NAME")
@options.path("--adapter", "a PEFT adapter on the trainer's model")
@options.choice("--support", "tokens over which the trainer normalises; TRL: full", "truncated", "full")
def judge_command(paths: tuple[str, ...], **given: Any) -> None:
    """Judge an engine's log-probs against the trainer's.

    Errors are measured in units of the trainer's own rounding. Then follows the contract of an engine (docs/rollouts.md), line
    by line. Without RECORDING: the shipped ones. Exit code 1 if one disagrees or a line is broken.
    """
    prepare("cpu")
    from parity import recording
    from parity.rollouts import contract

    found, why = [], list[str]()
    for one in [recording.load(path) for path in paths or sorted(map(str, rollouts_dir().glob("**/*-t*.json")))]:
        verdict, broken = contract.held(one, **given)
        click.echo(verdict.text(one))
        found.append((one, broken))
        lines = [f"{said} (the contract's {line!r})" for line, said in broken.items()]
        why += lines if verdict.agrees else [f"{one.name} disagrees"]
    if given["support"] == "truncated":
        for line, answer in contract.table(found).items():
            click.echo(f"{line}, {contract.LINES[line]}: {answer}")
    if any(one.facts.get("device") == "cpu" for one, _ in found):
        click.echo("An engine that computed on a CPU says nothing of its GPU kernels.")
    if why:
        click.echo(f"Exit code 1: {'; '.join(why)}.")
    raise SystemExit(1 if why else 0)
