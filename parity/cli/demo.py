"""`parity demo`: a right loss and one with a mistake on a few drawn cases, and the finding. It needs no TRL and no Liger."""

from pathlib import Path

from rich.console import Console

from parity.cli import demo_losses
from parity.cli.progress import Shown
from parity.cli.show import report
from parity.errors import FAULT
from parity.results.report import render, wording
from parity.results.report.summary import summarise
from parity.running.run import Options, execute

RIGHT, WRONG = "right", "ratio_dropped"
INTRODUCTION = """Two policy losses in {file}:
  right          PPO's clipped loss with the importance ratio π/π_old
  ratio_dropped  the same with a ratio of 1: π_old is never read, and the value looks plausible
Each runs on drawn cases, forward and backward, and is compared with its definition in float64."""
NEXT = """
{card}
How to read it: docs/reading-a-report.md. The page of this run: {page}
Your own loss:         parity run --implementation my_loss.py:NAME --profile quick
A test of your kernel: parity init"""


def demo(folder: Path, console: Console) -> int:
    """Copy the losses into `folder`, run them, show the finding; 0 where the right one agrees and the wrong one does not."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "losses.py"
    file.write_text(Path(demo_losses.__file__).read_text())
    render.show(INTRODUCTION.format(file=file), console)
    names = {name: f"{file}:{name}" for name in (RIGHT, WRONG)}
    options = Options(
        profile="demo",
        families=("policy",),
        implementations=tuple(names.values()),
        device="cpu",
        reports=folder,
        minimise=False,
        workers=1,
    )
    with Shown() as progress:
        result = execute(options, progress)
    report(result.header, result.rows, options.file, folder, result.reasons, result.exit_code, None)
    for name, id in names.items():
        rows = [row for row in result.rows if row.implementation == id and row.judged]
        failed = {row.case for row in rows if row.failing}
        said = f"disagrees in {len(failed)}" if failed else "agrees in all"
        render.show(f"{name:<14} {said} of {wording.count(len({row.case for row in rows}), 'case')}", console)
    found = summarise(result.header, result.rows).findings
    if {finding.implementation for finding in found} != {names[WRONG]}:
        return FAULT
    most = max((part for finding in found for part in finding.parts), key=lambda part: len(part.failing))
    card = render.text_of(most.rows, console.width)
    render.show(NEXT.format(card=card, page=folder / "index.html"), console)
    return 0
