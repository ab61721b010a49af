"""What the watch says of a user's trainer on a case of a check."""

import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from parity.implementations.user import MODULE
from parity.trainers.rig import drive
from parity.watching.watch import Watch, logger


def said(run: Callable[[], object]) -> list[str]:
    """What is said of the trainers of a user's class that are built in `run`, each line once."""
    lines, handler, build = dict[str, None](), logging.Handler(), drive.build
    handler.emit = lambda record: lines.setdefault(record.getMessage())  # type: ignore[method-assign]

    def built(*given: Any, **more: Any) -> Any:
        trainer = build(*given, **more)
        if type(trainer).__module__.startswith(MODULE):
            Watch(trainer, to=Path(folder) / "watch.ndjson")
        return trainer

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(drive, "build", built))
        stack.enter_context(mock.patch.object(logger, "propagate", False))
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        run()
    return [line for line in lines if "watch: looked at" not in line]
