"""What a watch says of a run: findings, which end it with `on_mismatch="raise"`, notes, a line of each look, the page."""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from parity.judge.calls import told
from parity.results import watched
from parity.results.watched import Finding
from parity.rollouts.scoring import innermost

logger = logging.getLogger("parity.watch")
ABOUT = {"trainer": {"logps"}, "reference": {"ref_logps"}, "loss": {"loss", "gradient"}}
"""What a finding is of -> quantities of the ledger's entries."""


def kind(what: str, causes: Sequence[str]) -> tuple[str, ...]:
    """What a finding is of and its causes, whatever the count of rows or tokens."""
    return (what, *(re.sub(r"\d+ of \d+", "some of", cause) for cause in causes))


class Told(TrainerCallback):
    """`findings` of the run so far."""

    def __init__(self, trainer: Any, on_mismatch: str, to: Path):
        self.trainer, self.on_mismatch, self.to = trainer, on_mismatch, to
        self.findings: list[Finding] = []
        self._looked: list[dict[str, Any]] = []
        self._measured: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._said: set[tuple[str, ...]] = set()
        self._mismatch = ""

    @property
    def _now(self) -> int:
        return int(self.trainer.state.global_step)

    def _known(self, what: str) -> str:
        """What the ledger has against the log-probs, or the loss, of this run on this stack, with the fix."""
        try:
            from parity.tools.settings_check import known_of
        except ImportError:
            return ""  # the ledger is read with msgspec, which a training run needs not have
        model = str(getattr(innermost(self.trainer.model).config, "model_type", ""))
        found = known_of(self.trainer, model, ABOUT.get(what, ()))
        return "".join(f"; known of this stack: {e.id}, fix: {e.user.fix}" for e in found)

    def _wrong(
        self, found: tuple[str, list[str]] | None, own: bool = False, of: str = "", has: str = "loss", who: Any = None
    ) -> None:
        """A finding; where something is the user's `own`, which it `has`, a note, one of each `of`."""
        if found is None:
            return
        text = f"{found[0]}: {' or '.join(found[1]) or 'no known cause'}"
        if not own:
            self._find("loss", math.nan, tuple(found[1]), text)
        else:
            why = f"{type(who or self.trainer).__name__} has a {has} of its own: no finding, if you meant that"
            self._say(("own", of, str(not found[1])), f"watch, step {self._now + 1}: {text}; {why}")

    def _find(
        self, what: str, units: float, named: tuple[str, ...], text: str, tokens: Any = (), strips: Sequence[str] = ()
    ) -> None:
        about, text = kind(what, named), f"watch, step {self._now + 1}: {text}{self._known(what)}"
        if kind(what, [text]) in {kind(f.what, [f.text]) for f in self.findings}:
            return  # of another micro-batch
        self.findings.append(Finding(what, units, named, text, tuple(tokens), tuple(strips)))
        if self.on_mismatch == "warn" or self._mismatch:
            self._say(about, text)
        elif about not in self._said:
            self._said.add(about)
            self._mismatch = text

    def _finds(self, what: str, texts: Iterable[str]) -> None:
        """Each is a cause, too, that is found once."""
        for text in texts:
            if kind(what, (text,)) not in self._said:
                self._find(what, math.nan, (text,), text)

    def _say(self, about: tuple[str, ...], text: str) -> None:
        """Once of each."""
        if about not in self._said:
            self._said.add(about)
            logger.warning(text)

    def _write(self, found: list[Finding]) -> None:
        """One line of what was measured and found, and a page of all findings; a file that takes none ends nothing."""
        measured, self._measured = self._measured, {}
        self._metrics |= {name: value for name, value in measured.items() if name != "tokens"}
        self._looked.append({"step": self._now + 1, **measured})
        if not self.trainer.is_world_process_zero():
            return
        try:
            watched.write(self.to, self._looked, self.findings, found)
        except OSError as error:
            self._say(("file",), f"watch: nothing is written: {told(error)}")
