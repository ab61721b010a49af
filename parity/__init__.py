"""Numerical parity of post-training losses: oracle, reference and candidate on the same bits, with a name for who is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.running.run import RunResult

__version__ = "0.1.0"


def run(**options: Any) -> RunResult:
    """`parity run` from Python; the result has `rows`, `exit_code`, `reasons` and the `header`.

        found = parity.run(profile="quick", implementations=["my_kernel.py:my_loss"])
        worst = max((r for r in found.rows if r.headroom is not None), key=lambda r: r.headroom)

    Options are the command's, the fields of `parity.running.plan.Options` (`max_time` in seconds); one name needs no tuple, and
    a path may be text. Losses run in processes of their own; rows are written as they come, to `reports/results.ndjson` unless
    `results` or `reports` says otherwise. Raises UsageError as the command does, one line.
    """
    from pathlib import Path

    from parity.running.run import Options, execute

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    for name in ("families", "implementations", "dtypes", "require", "only"):
        if isinstance(given.get(name), str):
            given[name] = (given[name],)
    for name in ("ledger", "results", "reports", "resume"):
        if isinstance(given.get(name), str):
            given[name] = Path(given[name])
    return execute(Options(**given), lambda *told: None)


def capture(target, to="case.json", step=1, rows=None):  # type: ignore[no-untyped-def]
    """Write the batch of a real training step as a case; see `parity.tools.capture.capture`."""
    from parity.tools.capture import capture

    return capture(target, to, step, rows)


def watch(trainer, **options):  # type: ignore[no-untyped-def]
    """Hold a run against its own model as it runs; `parity.watching.watch.Watch` has the options."""
    from parity.watching.watch import Watch

    return Watch(trainer, **options)
