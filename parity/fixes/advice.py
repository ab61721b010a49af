"""`check`: what of the installed stack is known to be wrong for a trainer or a config file."""

from typing import Any


def check(source: Any, trainer: str | None = None) -> Any:
    """The known findings that these settings meet, and their fixes; nothing is changed.

        print(check(trainer))                  # a constructed trainer
        print(check("config.yaml"))            # as `trl grpo --config` takes it; or "args.json"

    `trainer` names the trainer class where a file leaves it open. The `parity.tools.settings_check.Advice` is true where
    something applies for certain. `parity findings --config FILE` prints the same.
    """
    from parity.tools.settings_check import check as advise  # the ledger is above this package: read only when asked

    return advise(source, trainer)
