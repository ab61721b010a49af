"""`parity.watch`: log-probs, gradients and loss of a real training run, held against the model's own forward as it runs."""

import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from parity.watching import causes, definition
from parity.watching.causes import Difference, Facts, agrees, rms
from parity.watching.own import SAMPLE, Own, Rows, drops, innermost, own, rows_of, score, undisturbed
from parity.watching.taps import Taken, Taps

logger = logging.getLogger("parity.watch")
SIDES = {
    "trainer": "the trainer's log-probs differ from the model's own",
    "sampler": "the sampler's log-probs differ from the trainer's",
    "old": "the old log-probs differ from the policy's before an update",
    "reference": "reference and policy differ at step 1",
}


class Mismatch(AssertionError):
    """Raised by a watched run under `on_mismatch="raise"`; the message is the warning's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One difference that noise does not explain.

    Attributes:
        what: "trainer", "sampler", "old", "reference", "gradient" or "loss".
        units: rms of the difference in units of the noise; NaN where it has none.
        causes: those that explain it down to noise; empty where none of the known ones does.
        text: one line.
        tokens: those that differ most.
    """

    what: str
    units: float
    causes: tuple[str, ...]
    text: str
    tokens: tuple[Mapping[str, Any], ...] = ()


class Watch(TrainerCallback):
    """What `parity.watch` returns: `findings` of the run so far; `undo()` ends it."""

    def __init__(self, trainer: Any, every: int, rows: int, on_mismatch: str, to: Path, memory_budget: int):
        self.trainer, self.every, self.rows, self.on_mismatch, self.to = trainer, every, rows, on_mismatch, to
        self.budget = memory_budget
        self.findings: list[Finding] = []
        self.seconds = 0.0
        """Spent in it so far."""
        self._taps = Taps(trainer)
        self._taken: list[Taken] | None = None
        self._inputs: Any = {}
        self._measured: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._said: set[tuple[str, ...]] = set()
        self.on_train_begin()
        if hasattr(trainer, "_generate_and_score_completions"):
            self._generated = -2  # in the midst of a run: wait for completions of the present weights
            self._taps.around("_generate_and_score_completions", self._generating)
        trainer.add_callback(self)
        self._taps.around("training_step", self._step)
        self._taps.around("_prepare_inputs", self._prepared)
        self._taps.around("log", self._logged)
        self._taps.scored(self._seen)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """A trainer may train more than once."""
        self._due: int | None = None
        self._begun = self._generated = -1
        self._old: list[tuple[int, dict[str, Tensor]]] = []
        self._sloped = False

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Gradients are complete, the weights are the old ones."""
        self._guarded(self._before_update)

    def undo(self) -> None:
        """Takes every hook away; a second call does nothing."""
        self._taps.undo()
        handler = self.trainer.callback_handler
        handler.callbacks = [
            c for c in handler.callbacks if c is not self
        ]  # a new list: the old may be walked just now
        self._taken = None

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if self._due is None:
            self._due = self._begun = step
        self._taken = [] if step >= self._due else None
        out = original(*args, **kwargs)
        if self._taken == []:
            name = type(self.trainer).__name__
            self._say(("nothing",), f"watch: {name} hands out no log-probs: gradients alone are watched")
        elif self._taken and self._generated in (-1, step):
            self._guarded(self._look)
        self._taken, self._inputs = None, {}
        return out

    def _prepared(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if self._taken is not None and isinstance(out, Mapping):
            self._inputs = out
        return out

    def _generating(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.trainer.model.training:
            self._generated = self._now
        return original(*args, **kwargs)

    def _seen(self, read: Callable[[], Taken | None]) -> None:
        def keep() -> None:
            taken = read()
            if taken is not None and self._taken is not None:
                self._taken.append(taken)

        if self._taken is not None:
            self._guarded(keep)

    def _logged(self, original: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not any(name.startswith("eval_") for name in logs):
            logs.update(self._metrics)
            self._metrics = {}
        return original(logs, *args, **kwargs)

    def _guarded(self, do: Callable[[], None]) -> None:
        """An error of the watch itself ends it, never the run."""
        begun, before = time.perf_counter(), len(self.findings)
        try:
            try:
                do()
            finally:
                if self._measured or len(self.findings) > before:
                    self._write(self.findings[before:])
        except Mismatch:
            raise
        except Exception as error:
            self.undo()
            logger.warning("watch: %s; the run goes on unwatched", _line(error))
        finally:
            self.seconds += time.perf_counter() - begun

    def _before_update(self) -> None:
        """The gradients of the first step; a copy of the weights where the next steps may have to know them."""
        named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if self._now == self._begun and getattr(self.trainer.accelerator, "scaler", None) is None:
            broken = [n for n, p in named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
            still = not any(p.grad is not None and bool(p.grad.any()) for p in named.values())
            if broken:
                more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
                self._find("gradient", math.nan, (), f"gradients are not finite: {', '.join(broken[:3])}{more}")
            elif still and self._sloped:
                self._find("gradient", math.nan, (), "no parameter has a gradient, and the loss has one")
        small = sum(p.numel() * p.element_size() for p in named.values()) * 2 <= self.budget
        if small and self._single and self._generated >= 0 and self._now + 2 >= (self._due or 0):
            weights = {n: p.detach().to("cpu", copy=True) for n, p in named.items()}
            self._old = [*self._old[-1:], (self._now, weights)]

    @property
    def _now(self) -> int:
        return int(self.trainer.state.global_step)

    @property
    def _model(self) -> Any:
        return getattr(self.trainer.model, "_orig_mod", self.trainer.model)

    @property
    def _single(self) -> bool:
        return bool(self.trainer.accelerator.num_processes == 1)

    def _look(self) -> None:
        """Everything about the micro-batch just scored; its backward pass is done, the optimizer has not stepped."""
        trainer, taken = self.trainer, next((t for t in self._taken or () if t.trained), None)
        if taken is None:
            return
        mask = definition.loss_mask(self._inputs) if taken.mask is None else taken.mask
        rows = rows_of(taken.ids, taken.attention, mask[:, -taken.logps.shape[1] :], self.rows)
        tokens = sum(map(len, rows.places))
        if not tokens:
            return
        self._due = self._now + self.every
        self._temperature = float(getattr(trainer, "temperature", None) or 1.0) if taken.mask is None else 1.0
        sides = self._sides(taken, rows, drops(trainer.model))
        mine = self._own(rows, range(2 if self._single and tokens < SAMPLE // 4 else 1))
        self._measured = {"tokens": tokens, "watch/noise": mine.noise}
        for what, values in sides.items():
            if values is not None:
                self._judge(what, Difference(values, mine), rows, sides["trainer"])
        if taken.slopes is not None:
            self._sloped = self._sloped or bool(taken.slopes.any())
            self._loss(taken)

    def _own(self, rows: Rows, seeds: Sequence[int], dtype: torch.dtype | None = None) -> Own:
        with undisturbed(self._model), self.trainer.accelerator.autocast():
            return own(self._model, rows, self._temperature, seeds, dtype)

    def _sides(self, taken: Taken, rows: Rows, dropped: bool) -> dict[str, Tensor | None]:
        """Log-probs of the tokens by the trainer and whoever else has them; under dropout the sampler's alone."""

        def of(name: str) -> Tensor | None:
            value = self._inputs.get(name)
            fits = torch.is_tensor(value) and value.shape == rows.picked.shape
            return rows.of(value) if fits else None

        out = {"trainer": None if dropped else rows.of(taken.logps), "sampler": of("sampling_per_token_logps")}
        if not dropped and self._generated == self._now:
            out["old"] = of("old_per_token_logps")
        if not dropped and self._now == self._begun == 0 and self._is_reference():
            out["reference"] = of("ref_per_token_logps")
            if out["reference"] is None and taken.mask is not None:
                others = (t for t in self._taken or () if not t.trained and t.logps.shape == taken.logps.shape)
                same = (rows.of(t.logps) for t in others if torch.equal(t.ids, taken.ids))
                out["reference"] = next(same, None)
        return out

    def _is_reference(self) -> bool:
        """Whether policy and reference have the same weights before the first update."""
        mine, reference = dict(self.trainer.model.named_parameters()), getattr(self.trainer, "ref_model", None)
        if reference is None:
            adapted = [p for n, p in mine.items() if ".lora_B." in n and ".ref." not in n]
            return bool(adapted) and not any(bool(p.any()) for p in adapted)
        theirs = dict(reference.named_parameters())
        return mine.keys() == theirs.keys() and all(torch.equal(p.to(theirs[n]), theirs[n]) for n, p in mine.items())

    def _judge(self, what: str, found: Difference, rows: Rows, trainer: Tensor | None) -> None:
        units = found.units()
        self._measured[f"watch/{what}_units"] = rms(units)
        if what == "sampler" and len(units):
            against = found.own.scores.logps if trainer is None else trainer
            d = (against - found.values)[found.there & found.values.isfinite()]
            self._measured |= {
                "sampling/mismatch_kl": float(-d.mean()),
                "sampling/k3": float((d.exp() - d - 1).mean()),
                "sampling/mean_exp_abs_difference": float(d.abs().exp().mean()),
            }
        if agrees(units):
            return
        if what != "trainer" and trainer is not None and agrees(found.units(trainer)):
            return  # they agree with each other, and the trainer's finding is theirs
        named, tokens, none = tuple[str, ...](), list[dict[str, Any]](), "no known cause"
        try:
            tokens = causes.farthest(found, rows, self._decoded)
            named = tuple(causes.explanations(found, rows, self._facts(what, rows, found.own)))
        except Exception as error:
            none = f"no cause, for {_line(error)}"
        most = ", ".join(f"{t['token']!r} {t['logp']:.3f} for {t['own']:.3f}" for t in tokens[:3])
        size = f"{SIDES[what]} by {rms(units):.3g} times its noise ({len(units)} tokens)"
        self._find(what, rms(units), named, f"{size}: {' or '.join(named) or f'{none}; most: {most}'}", tokens)

    def _known(self, what: str) -> str:
        """What the ledger has against the log-probs, or the loss, of this run on this stack, with the fix."""
        try:
            from parity import data
            from parity.results.ledger import Ledger
            from parity.tools.settings_check import ALIASES, Run, advice
        except ImportError:
            return ""  # the ledger is read with msgspec, which a training run needs not have
        kinds = tuple(k.__name__ for k in type(self.trainer).__mro__ if k.__name__.endswith("Trainer"))
        args = {ALIASES.get(name, name): value for name, value in vars(self.trainer.args).items()}
        uses = frozenset(name for name, value in args.items() if value is True)
        kind = str(getattr(innermost(self.trainer.model).config, "model_type", ""))
        found = advice(Run(kinds[0], kinds, args, (kind,), uses), Ledger.load(data.ledger_file())).findings
        about = {"trainer": {"logps"}, "reference": {"ref_logps"}, "loss": {"loss", "gradient"}}.get(what, set())
        known = [f.entry for f in found if f.certain and about & {*f.entry.quantities}]
        return "".join(f"; known of this stack: {e.id}, fix: {e.user.fix}" for e in known)

    def _facts(self, what: str, rows: Rows, mine: Own) -> Facts:
        """What may explain a difference of this run."""
        sources = (self.trainer.args, getattr(self.trainer.model, "generation_config", None))
        sampling = [(float(getattr(s, "top_p", None) or 1.0), int(getattr(s, "top_k", None) or 0)) for s in sources]
        others: dict[str, Callable[[], Tensor]] = {}
        coarser: dict[str, Callable[[], Own]] = {}
        if self._single:
            for back, (_, weights) in enumerate(reversed(self._old), 1):
                name = f"weights {back} update{'s' * (back > 1)} old"
                others[name] = functools.partial(self._by, rows, weights)
            if hasattr(self._model, "disable_adapter") and what != "reference":
                others["the adapter is left out"] = functools.partial(self._by, rows, None)
            if what == "sampler":
                for dtype in (torch.float16, torch.bfloat16):
                    name = str(dtype).removeprefix("torch.")
                    coarser[name] = functools.partial(self._own, rows, range(4), dtype)
        head = {} if what == "old" else causes.heads(self._model, mine.scores)
        return Facts(self._temperature, what == "sampler", sampling, head, others, coarser)

    def _by(self, rows: Rows, weights: dict[str, Tensor] | None) -> Tensor:
        """Log-probs by the model with these weights in place of its own, or without its adapter."""
        model = self._model
        with undisturbed(model), self.trainer.accelerator.autocast():
            if weights is not None:
                device = next(model.parameters()).device
                replaced = _Replaced(model, {n: w.to(device) for n, w in weights.items()})
                return score(replaced, rows, self._temperature).logps
            with model.disable_adapter():
                return score(model, rows, self._temperature).logps

    def _loss(self, taken: Taken) -> None:
        """GRPO's loss by the gradient of its log-probs; of a subclass with another loss or step nothing is known."""
        kind = type(self.trainer)
        methods = [getattr(kind, n) for n in ("_compute_loss", "compute_loss", "training_step") if hasattr(kind, n)]
        released = all(m.__module__.startswith(("trl.", "transformers.")) for m in methods)
        if taken.slopes is None or not released or methods[0].__module__ != "trl.trainer.grpo_trainer":
            return
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        found = taken.slopes.detach().double().cpu() / (1.0 if scaler is None else scaler.get_scale())
        s, x = definition.policy(self.trainer, self._inputs, taken.logps, taken.entropies)
        named = definition.faults(self.trainer, s, x, found, taken.logps.dtype)
        if named is not None:
            text = (
                f"gradients of the log-probs are not those of {s.loss_type}: {' or '.join(named) or 'no known cause'}"
            )
            self._find("loss", math.nan, tuple(named), text)

    def _find(self, what: str, units: float, named: tuple[str, ...], text: str, tokens: Any = ()) -> None:
        text = f"watch, step {self._now + 1}: {text}{self._known(what)}"
        self.findings.append(Finding(what, units, named, text, tuple(tokens)))
        self._say((what, *named), text, self.on_mismatch == "raise")

    def _say(self, about: tuple[str, ...], text: str, ends: bool = False) -> None:
        """Once of each."""
        if about in self._said:
            return
        self._said.add(about)
        if ends:
            raise Mismatch(text)
        logger.warning(text)

    def _decoded(self, token: int) -> str:
        tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
        return str(tokenizer.decode([token])) if hasattr(tokenizer, "decode") else str(token)

    def _write(self, found: list[Finding]) -> None:
        """One line of what was measured and found; a file that takes none ends nothing."""
        measured, self._measured = self._measured, {}
        self._metrics |= {name: value for name, value in measured.items() if name != "tokens"}
        if not self.trainer.is_world_process_zero():
            return
        line = {"step": self._now + 1, **measured, "findings": [dataclasses.asdict(f) for f in found]}
        try:
            self.to.parent.mkdir(parents=True, exist_ok=True)
            with self.to.open("a") as file:
                file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        except OSError as error:
            self._say(("file",), f"watch: nothing is written: {_line(error)}")


class _Replaced:
    """A model called with other weights; its own stay."""

    def __init__(self, model: Any, weights: dict[str, Tensor]):
        self.module, self.weights = model, weights

    def __call__(self, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.module, self.weights, kwargs=kwargs)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _finite(x: Any) -> Any:
    """As JSON has it: null for a number that is not finite."""
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def watch(
    trainer: Any,
    every: int = 50,
    rows: int = 4,
    on_mismatch: str = "warn",
    to: str | Path = "reports/watch.ndjson",
    memory_budget: int = 1 << 30,
) -> Watch:
    """See `parity.watch`."""
    if on_mismatch not in ("warn", "raise"):
        raise ValueError(f"on_mismatch={on_mismatch!r}: 'warn' or 'raise'")
    if every < 1 or rows < 1:
        raise ValueError(f"every={every}, rows={rows}: at least 1")
    if not hasattr(trainer, "training_step") or not hasattr(trainer, "accelerator"):
        raise TypeError(f"watch: {type(trainer).__name__} is no trainer")
    return Watch(trainer, every, rows, on_mismatch, Path(to), memory_budget)
