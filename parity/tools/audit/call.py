"""One call of an implementation, with its warnings and the line that raised an error."""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from parity.case.inputs import Inputs
from parity.implementations.implementation import Implementation, Outputs
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.tools.audit import source_lines


def run(implementation: Implementation, inputs: Inputs) -> tuple[Outcome, set[str], str]:
    """The outcome, the warnings, and where an error came from; the inputs, which others share, are restored."""
    raised: list[str] = []

    def call(x: Inputs) -> Outputs:
        try:
            return implementation.call(x)
        except Exception as error:
            raised.append(source_lines.raised(error))
            raise

    with heard() as said:
        outcome = execute(dataclasses.replace(implementation, call=call), inputs)
    return outcome, set(said), raised[0] if raised else ""


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Warnings and log lines of level warning, also those that a filter or a level would keep from a user's eyes here."""
    said: list[str] = []
    warn, log = warnings.warn, logging.Logger.warning

    def warned(message: Any, *args: Any, **kwargs: Any) -> Any:
        said.append(str(message))
        return warn(message, *args, **kwargs)

    def logged(self: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> Any:
        said.append(str(message))
        return log(self, message, *args, **kwargs)

    warnings.warn, logging.Logger.warning = warned, logged  # type: ignore[assignment,method-assign]
    try:
        yield said
    finally:
        warnings.warn, logging.Logger.warning = warn, log  # type: ignore[method-assign]


def entry_points(implementation: Implementation) -> tuple[str, ...]:
    """Dotted names of the code that runs, also where TRL's trainer has its loss elsewhere than in the loss's method."""
    trainer = "trl.trainer.grpo_trainer"
    if implementation.id == "trl.GRPOTrainer":  # since 1.15 the head is fused into the model's forward
        return (*implementation.sources, f"{trainer}.add_fused_lm_head")
    if implementation.id == "trl.GRPOTrainer.liger" and source_lines.installed(implementation.sources) is None:
        return (f"{trainer}.GRPOTrainer._compute_loss",)  # in 1.14 the flag changes the log-probs alone
    return implementation.sources
