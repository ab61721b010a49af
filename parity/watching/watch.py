"""`parity.watch`: log-probs, gradients and loss of a real training run, held against the model's own forward as it runs."""

import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


class Watch:
    """What `parity.watch` returns: `findings` of the run so far; `undo()` ends it."""

    def __init__(self, trainer: Any, every: int, rows: int, on_mismatch: str, to: Path, memory_budget: int):
        self.trainer, self.every, self.rows, self.on_mismatch, self.to = trainer, every, rows, on_mismatch, to
        self.budget = memory_budget
        self.findings: list[Finding] = []
        self.seconds = 0.0
        """Spent in it so far."""
        self._taps = Taps(trainer)
        self._due: int | None = None
        self._begun = self._generated = -1
        self._taken: list[Taken] | None = None
        self._inputs: Any = {}
        self._metrics: dict[str, float] = {}
        self._said: set[tuple[str, ...]] = set()
        self._old: list[tuple[int, dict[str, Tensor]]] = []
        self._sloped = False

    def install(self) -> None:
        """Hooks, and a callback for gradients."""
        from transformers import TrainerCallback

        class Gradients(TrainerCallback):
            def on_pre_optimizer_step(_, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                self._guarded(self._before_update)

        callback = Gradients()
        self.trainer.add_callback(callback)
        self._taps._undo.append(lambda: self.trainer.remove_callback(callback))
        self._taps.around("training_step", self._step)
        self._taps.around("_prepare_inputs", self._prepared)
        self._taps.around("log", self._logged)
        if hasattr(self.trainer, "_generate_and_score_completions"):
            self._taps.around("_generate_and_score_completions", self._generating)
        self._taps.scored(self._seen)

    def undo(self) -> None:
        """Takes every hook away; a second call does nothing."""
        self._taps.undo()

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.trainer.state
        if self._due is None:
            self._due = self._begun = state.global_step
        self._taken = [] if state.global_step >= self._due else None
        self._sloped = False
        out = original(*args, **kwargs)
        if self._taken == [] and not self._said:
            self._said.add(("nothing",))
            logger.warning("watch: %s hands out no log-probs: gradients alone are watched", type(self.trainer).__name__)
        elif self._taken and self._generated in (-1, state.global_step):
            self._due = state.global_step + self.every
            self._guarded(self._look)
        self._taken, self._inputs = None, {}
        return out

    def _prepared(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if self._taken is not None:
            self._inputs = out
        return out

    def _generating(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.trainer.model.training:
            self._generated = self.trainer.state.global_step
        return original(*args, **kwargs)

    def _seen(self, taken: Taken) -> None:
        if self._taken is not None:
            self._taken.append(taken)

    def _logged(self, original: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not any(name.startswith("eval_") for name in logs):
            logs.update(self._metrics)
            self._metrics = {}
        return original(logs, *args, **kwargs)

    def _guarded(self, do: Callable[[], None]) -> None:
        """An error of the watch itself ends it, never the run."""
        begun = time.perf_counter()
        try:
            do()
        except Mismatch:
            raise
        except Exception as error:
            self.undo()
            logger.warning(
                "watch: %s: %s; the run goes on unwatched", type(error).__name__, str(error).partition("\n")[0]
            )
        self.seconds += time.perf_counter() - begun

    def _before_update(self) -> None:
        """The gradients of the first step; a copy of the weights where the next steps may have to know them."""
        trainer, step = self.trainer, self.trainer.state.global_step
        named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        if step == self._begun and getattr(trainer.accelerator, "scaler", None) is None:
            broken = [n for n, p in named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
            still = not any(p.grad is not None and bool(p.grad.any()) for p in named.values())
            if broken:
                self._find("gradient", math.nan, (), f"gradients of step 1 are not finite: {_some(broken)}")
            elif still and self._sloped:
                self._find("gradient", math.nan, (), "no parameter has a gradient in step 1, and the loss has one")
        small = sum(p.numel() * p.element_size() for p in named.values()) * 2 <= self.budget
        if small and self._single and self._generated >= 0 and step + 2 >= (self._due or 0):
            self._old = [*self._old[-1:], (step, {n: p.detach().to("cpu", copy=True) for n, p in named.items()})]

    @property
    def _single(self) -> bool:
        return bool(self.trainer.accelerator.num_processes == 1)

    def _look(self) -> None:
        """Everything about the micro-batch just scored; its backward pass is done, the optimizer has not stepped."""
        trainer, inputs = self.trainer, self._inputs if isinstance(self._inputs, Mapping) else {}
        taken = next((t for t in self._taken or () if t.trained), None)
        if taken is None:
            return
        width = taken.logps.shape[1]
        mask = taken.mask
        if mask is None:
            mask = (
                inputs["completion_mask"] * inputs["tool_mask"] if "tool_mask" in inputs else inputs["completion_mask"]
            )
        rows = rows_of(taken.ids, taken.attention, mask[:, -width:], self.rows)
        self._temperature = float(getattr(trainer, "temperature", None) or 1.0) if taken.mask is None else 1.0
        dropped = drops(trainer.model)
        model = getattr(trainer.model, "_orig_mod", trainer.model)
        count = 2 if self._single and sum(map(len, rows.places)) < SAMPLE // 4 else 1
        with undisturbed(model), trainer.accelerator.autocast():
            mine = own(model, rows, self._temperature, range(count))
        sides = {"trainer": None if dropped else rows.of(taken.logps)} | self._sides(taken, rows, inputs, dropped)
        self._metrics["watch/noise"] = mine.noise
        for what, values in sides.items():
            if values is not None:
                self._judge(model, what, Difference(values, mine), rows, sides["trainer"])
        if taken.slopes is not None and bool(taken.slopes.any()):
            self._sloped = True
        self._loss(taken, inputs)
        self._write(mine, rows)

    def _sides(self, taken: Taken, rows: Rows, inputs: Any, dropped: bool) -> dict[str, Tensor | None]:
        """Log-probs of the tokens by whoever else has them."""

        def of(name: str) -> Tensor | None:
            value = inputs.get(name)
            fits = torch.is_tensor(value) and value.shape == rows.picked.shape
            return rows.of(value) if fits else None

        out = {"sampler": of("sampling_per_token_logps"), "old": None if dropped else of("old_per_token_logps")}
        if self.trainer.state.global_step == self._begun == 0 and not dropped and self._is_reference():
            out["reference"] = of("ref_per_token_logps")
            if out["reference"] is None:
                same = (t for t in self._taken or () if not t.trained and torch.equal(t.ids, taken.ids))
                found = (
                    next((t for t in same if t.logps.shape == taken.logps.shape), None)
                    if taken.mask is not None
                    else None
                )
                out["reference"] = None if found is None else rows.of(found.logps)
        return out

    def _is_reference(self) -> bool:
        """Whether policy and reference have the same weights before the first update."""
        model, reference = self.trainer.model, getattr(self.trainer, "ref_model", None)
        if reference is None:
            adapted = {n: p for n, p in model.named_parameters() if ".lora_B." in n and ".ref." not in n}
            return bool(adapted) and not any(bool(p.any()) for p in adapted.values())
        theirs = dict(reference.named_parameters())
        mine = dict(model.named_parameters())
        return mine.keys() == theirs.keys() and all(
            torch.equal(p.to(theirs[n].dtype), theirs[n]) for n, p in mine.items()
        )

    def _judge(self, model: Any, what: str, found: Difference, rows: Rows, trainer: Tensor | None) -> None:
        units = found.units()
        self._measure(what, found, units, trainer)
        if agrees(units):
            return
        if (
            what != "trainer"
            and trainer is not None
            and agrees(((found.values - trainer) / found.own.units)[found.there])
        ):
            return  # they agree with each other, and the trainer's finding is theirs
        named = tuple(causes.explanations(found, rows, self._facts(model, what, rows, found.own)))
        tokens = tuple(causes.farthest(found, rows, self._decoded))
        size = f"{SIDES[what]} by {rms(units):.3g} times its noise ({len(units)} tokens)"
        most = ", ".join(f"{t['token']!r} {t['logp']:.3f} for {t['own']:.3f}" for t in tokens[:3])
        text = f"{size}: {' or '.join(named) or f'no known cause; most: {most}'}{self._known(what)}"
        self._find(what, rms(units), named, text, tokens)

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

    def _measure(self, what: str, found: Difference, units: Tensor, trainer: Tensor | None) -> None:
        self._metrics[f"watch/{what}_units"] = rms(units)
        if what == "sampler" and len(units):
            against = found.own.scores.logps if trainer is None else trainer
            d = (against - found.values)[found.there & found.values.isfinite()]
            self._metrics |= {
                "sampling/mismatch_kl": float(-d.mean()),
                "sampling/k3": float((d.exp() - d - 1).mean()),
                "sampling/mean_exp_abs_difference": float(d.abs().exp().mean()),
            }

    def _facts(self, model: Any, what: str, rows: Rows, mine: Own) -> Facts:
        """What may explain a difference of this run."""
        sources = (self.trainer.args, getattr(self.trainer.model, "generation_config", None))
        sampling = [(float(getattr(s, "top_p", None) or 1.0), int(getattr(s, "top_k", None) or 0)) for s in sources]
        others: dict[str, Callable[[], Tensor]] = {}
        if self._single:
            for back, (_, weights) in enumerate(reversed(self._old), 1):
                name = f"weights {back} update{'s' * (back > 1)} old"
                others[name] = functools.partial(self._by, model, rows, weights)
            if hasattr(model, "disable_adapter") and what != "reference":
                others["the adapter is left out"] = functools.partial(self._by, model, rows, None)
        head = {} if what == "old" else causes.heads(model, mine.scores)
        coarser = {}
        if self._single and what == "sampler":
            dtypes = (torch.float16, torch.bfloat16)
            coarser = {str(d).removeprefix("torch."): functools.partial(self._coarse, model, rows, d) for d in dtypes}
        return Facts(self._temperature, what == "sampler", sampling, head, others, coarser)

    def _coarse(self, model: Any, rows: Rows, dtype: torch.dtype) -> Own:
        with undisturbed(model), self.trainer.accelerator.autocast():
            return own(model, rows, self._temperature, range(4), dtype)

    def _by(self, model: Any, rows: Rows, weights: dict[str, Tensor] | None) -> Tensor:
        """Log-probs by the model with these weights in place of its own, or without its adapter."""
        with undisturbed(model), self.trainer.accelerator.autocast():
            if weights is not None:
                device = next(model.parameters()).device
                there = {n: w.to(device) for n, w in weights.items()}
                return score(_Replaced(model, there), rows, self._temperature).logps
            with model.disable_adapter():
                return score(model, rows, self._temperature).logps

    def _loss(self, taken: Taken, inputs: Any) -> None:
        """GRPO's loss by the gradient of its log-probs; of a subclass with another loss nothing is known."""
        own_loss = getattr(type(self.trainer), "_compute_loss", None) or type(self.trainer).compute_loss
        known = own_loss.__module__ == "trl.trainer.grpo_trainer" and hasattr(self.trainer.args, "loss_type")
        if taken.slopes is None or not known:
            return
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        found = taken.slopes.detach().double().cpu() / (1.0 if scaler is None else scaler.get_scale())
        s, x = definition.policy(self.trainer, inputs, taken.logps, taken.entropies)
        named = definition.faults(self.trainer, s, x, found, taken.logps.dtype)
        if named is not None:
            text = (" or ".join(named) or "no known cause") + self._known("loss")
            self._find(
                "loss", math.nan, tuple(named), f"gradients of the log-probs are not those of {s.loss_type}: {text}"
            )

    def _find(self, what: str, units: float, named: tuple[str, ...], text: str, tokens: Any = ()) -> None:
        text = f"watch, step {self.trainer.state.global_step + 1}: {text}"
        finding = Finding(what, units, named, text, tokens)
        self.findings.append(finding)
        if (what, *named) not in self._said:
            self._said.add((what, *named))
            if self.on_mismatch == "raise":
                raise Mismatch(text)
            logger.warning(text)

    def _decoded(self, token: int) -> str:
        tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
        return str(tokenizer.decode([token])) if hasattr(tokenizer, "decode") else str(token)

    def _write(self, mine: Own, rows: Rows) -> None:
        if not self.trainer.is_world_process_zero():
            return
        step = self.trainer.state.global_step + 1
        of_step = [dataclasses.asdict(f) for f in self.findings if f.text.startswith(f"watch, step {step}:")]
        line = {"step": step, "tokens": len(mine.scores.logps), **self._metrics, "findings": of_step}
        self.to.parent.mkdir(parents=True, exist_ok=True)
        with self.to.open("a") as file:
            file.write(json.dumps(line) + "\n")


class _Replaced:
    """A model called with other weights; its own stay."""

    def __init__(self, model: Any, weights: dict[str, Tensor]):
        self.module, self.weights = model, weights

    def __call__(self, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.module, self.weights, kwargs=kwargs)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    made = Watch(trainer, every, rows, on_mismatch, Path(to), memory_budget)
    made.install()
    return made
