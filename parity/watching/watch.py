"""`parity.watch`: log-probs, gradients and loss of a real training run, held against the model's own forward as it runs."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.judge.calls import told
from parity.results import watched
from parity.rollouts import causes
from parity.rollouts.scoring import Difference, agrees, drops, farthest, innermost, mismatch, rms, rows_of
from parity.trainers.definitions.micro_batch import defined, known, loss_mask, nearest
from parity.watching import batch, definition
from parity.watching.look import Look
from parity.watching.rewards import faults as advantage_faults
from parity.watching.step import Step, altered, at_top, broken, rates, sample
from parity.watching.taps import Taken, Taps, trained
from parity.watching.told import Told, kind, logger

SIDES = {
    "trainer": "the trainer's log-probs differ from the model's own",
    "sampler": "the sampler's log-probs differ from the trainer's",
    "old": "the old log-probs differ from the policy's before an update",
    "reference": "reference and policy differ at step 1",
    "later": "the reference's log-probs differ from those by its weights",
    "again": "the old log-probs differ from those when the completions were generated",
}
FIXED = {"ref_model": "reference", "teacher_model": "teacher"}
"""Models of a trainer that no step of its optimizer may move."""
SYNCS = "Sync", "BEMA"
"""In the names of TRL's callbacks that move a reference or a teacher."""
GIVEN = "_prepare_inputs", "_calculate_rewards_from_functions"
"""Methods that give what the loss is made of; the second is OnlineDPOTrainer's, whose step prepares no inputs."""


class Mismatch(AssertionError):
    """Raised by a watched run under `on_mismatch="raise"`; the message is the warning's."""


class Watch(Told):
    """What `parity.watch` returns: `findings` of the run so far; `undo()` ends it. Raises ValueError for options out of
    range, TypeError for what is no trainer.

    `every` so many optimizer steps it looks at `rows` sequences. `on_mismatch`: "warn" or "raise". `to` gets a line of each
    look, the page is beside it. Tables of logits and copies of weights larger than `memory_budget` bytes are not made.
    `capture` keeps the batch of a finding as a case beside `to`."""

    def __init__(
        self,
        trainer: Any,
        every: int = 50,
        rows: int = 4,
        on_mismatch: str = "warn",
        to: str | Path = "reports/watch.ndjson",
        memory_budget: int = 1 << 30,
        capture: bool = False,
    ):
        if on_mismatch not in ("warn", "raise"):
            raise ValueError(f"on_mismatch={on_mismatch!r}: 'warn' or 'raise'")
        if every < 1 or rows < 1:
            raise ValueError(f"every={every}, rows={rows}: at least 1")
        if not hasattr(trainer, "training_step") or not hasattr(trainer, "accelerator"):
            raise TypeError(f"watch: {type(trainer).__name__} is no trainer")
        super().__init__(trainer, on_mismatch, Path(to))
        self.every, self.rows, self.budget, self.capture = every, rows, memory_budget, capture
        self.seconds = 0.0  # spent in it so far
        self._alone, self._scaler = trainer.accelerator.num_processes == 1, getattr(trainer.accelerator, "scaler", None)
        self._taps = Taps(trainer)
        self._taken: list[Taken] | None = None
        self._inputs: Any = {}
        self._rewards = list[Any]()  # of the completions that are generated just now
        self._error: Exception | None = None
        self._step_of: Step | None = None  # the first one until the next begins, others until they are done
        self._trainings = -1 if trainer.optimizer is None else 0
        self.on_train_begin()
        if hasattr(trainer, "_generate_and_score_completions"):
            self._generated = -2  # in the midst of a run: wait for completions of the present weights
        trainer.add_callback(self)
        wrappers = {"_generate_and_score_completions": self._generating, "_calculate_rewards": self._rewarded}
        wrappers |= {"training_step": self._step, "log": self._logged, "get_batch_samples": self._fetched}
        for name, wrapper in {**wrappers, **dict.fromkeys(GIVEN, self._given)}.items():
            self._taps.around(name, wrapper)
        self._taps.scored(self._seen)

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """A trainer may train more than once."""
        if getattr(train_dataloader, "num_workers", None) == 0:  # rows of workers are not here
            inner = getattr(train_dataloader, "base_dataloader", train_dataloader)
            self._taps.around("collate_fn", self._collated, inner)
        self._due: int | None = None
        self._begun = self._generated = -1
        self._again = False  # whether completions that are used once more are looked at
        self._batch: dict[str, Any] | None = None  # those, as they were generated
        self._taps.hooked()
        self._old: list[dict[str, Tensor]] = []
        self._sloped, self._noise = False, math.nan
        self._random = False  # whether the model in training computes by random numbers that are no dropout
        self._end()  # that of a training that an error ended
        self._taken, self._inputs, self._trainings = None, {}, self._trainings + 1
        self._made: list[tuple[str, Tensor, Tensor]] = []  # what the collator made for the first step, and copies
        self._rates: list[float] = []  # of the last step
        self._stepped = False  # whether one was whose learning rates are no longer on their way up

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        """Gradients are complete, the weights are the old ones."""
        self._guarded(lambda: self._before_update(kwargs.get("optimizer")))
        if self._now == self._begun:
            self._settle()

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        """The weights are the new ones, the gradients still there."""
        if not self._stepped and not self.trainer.accelerator.optimizer_step_was_skipped:
            self._guarded(lambda: self._after_update(kwargs.get("optimizer")))
            self._settle()  # also on a rank where nothing is to be compared: the others wait

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """That nothing was found is said too."""
        self._end()  # no second step came
        if self._looked and self.trainer.is_world_process_zero():
            steps = [*dict.fromkeys(str(look["step"]) for look in self._looked)]
            shown = ", ".join(steps if len(steps) < 8 else [*steps[:3], "…", steps[-1]])
            found, took = len({kind(f.what, f.causes) for f in self.findings}) or "no", f"{self.seconds:.1f} s"
            logger.warning("watch: looked at step %s in %s: %s finding%s", shown, took, found, "s" * (found != 1))

    def undo(self) -> None:
        """Takes every hook away; a second call does nothing."""
        self._taps.undo()
        self._end()
        handler = self.trainer.callback_handler  # a new list: the old may be walked just now
        handler.callbacks = [c for c in handler.callbacks if c is not self]
        self._taken = None

    def _end(self) -> None:
        step, self._step_of = self._step_of, None
        if step is not None:
            step.end()

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._due is None:
            self._due = self._begun = self._now
            self._step_of = Step(self.trainer.optimizer).follow(
                self._model if self._alone and not self._scaler else None
            )
        elif self._step_of is not None and self._now > self._begun:
            done, self._step_of = self._step_of, None
            self._guarded(lambda: self._behind(done))
        elif self._step_of is not None:
            self._guarded(self._step_of.further)
        if self._now < self._due and not (self._again and self._stale):
            return original(*args, **kwargs)
        self._taken, looks, items = [], list[Look](), (*args, None, None, None)[2] or kwargs.get("num_items_in_batch")
        before, run = len(self.findings), functools.partial(original, *args, **kwargs)
        weights = [(p, sample(p)) for p in self._model.parameters() if self._alone and p.requires_grad]
        if self.capture:
            from parity.tools.capture import captured

            rank = self.trainer.accelerator.process_index
            case = self.to.with_name(f"{self.to.stem}-step-{self._now + 1}{f'-rank-{rank}' if rank else ''}.json")
            out, why = captured(self.trainer, case, run)
            if why is not None:
                self._say(("capture",), f"watch: no case is written: {told(why)}")
        else:
            out = run()
        self._guarded(lambda: self._fixed(weights))
        if self._taken is None:
            return out  # it ended in the midst of the step
        self._guarded(lambda: looks.extend(self._ready()))
        if not self._most(not looks or self._error is not None):
            self._score(looks[0])
            self._guarded(lambda: self._look(looks[0], items, float(out)))
        elif not looks and self._error is None:
            self._guarded(lambda: self._valued(items, float(out)))
        if self.capture and len(self.findings) == before:
            for file in (case, case.with_suffix(".safetensors")):
                file.unlink(missing_ok=True)
        self._taken, self._inputs = None, {}
        self._settle()
        return out

    @staticmethod
    def _fixed(weights: list[tuple[Any, Tensor]]) -> None:
        """Raises where a backward pass has moved them: no log-probs can be compared then."""
        if any(bool(altered(p, before).any()) for p, before in weights):
            raise RuntimeError("the optimizer steps within the backward pass")

    def _score(self, at: Look) -> None:
        self._again = not self._stale
        at.rows = at.rows.filled(self._most(len(at.rows.ids)))  # rows that were packed differ in number
        if not self._stale:  # much shows behind the first update that moves weights alone
            still = self._now - self._begun < 2 and not any(self._rates)
            self._due = self._now + (1 if still else self.every - (self._now - self._begun) % self.every)
        self._guarded(lambda: at.score(self._noise, self.budget))
        if self._most(at.far()):  # the noise may have grown with the weights
            self._guarded(lambda: at.score(math.nan))
        if self._most(at.far(but="sampler")):
            self._guarded(at.drop_random)
            self._random = at.random
        self._noise = self._noise if at.mine is None else at.mine.noise

    def _given(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if self._taken is not None:  # of rewards a penalty is subtracted in place
            self._inputs = out if isinstance(out, Mapping) else {"rewards": out.clone()} if torch.is_tensor(out) else {}
        return out

    def _generating(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self._taken or ())
        out = original(*args, **kwargs)
        if self.trainer.model.training:
            self._generated, due = self._now, self._now >= (self._due or 0)
            self._batch = dict(out) if due and isinstance(out, Mapping) else None
            scored = [t.logps for t in (self._taken or ())[before:]]
            if self._batch is not None and len(scored) == 2 and nearest(self.trainer) == "rloo":
                self._batch["ref_per_token_logps"] = scored[1]  # behind the policy's
            if self._batch is not None and len(self._rewards) == 1:
                own = not self._trls(getattr(type(self.trainer), "_generate_and_score_completions", None))
                given = self.trainer, self._rewards[0], self._batch, scored
                self._guarded(lambda: self._wrong(advantage_faults(*given), own, "advantages"))
        self._rewards.clear()
        return out

    def _rewarded(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        self._rewards = [*self._rewards[-1:], out]  # of more than one call none is compared
        return out

    @staticmethod
    def _trls(of: Any) -> bool:
        """Whether it comes from TRL or transformers."""
        return getattr(of, "__module__", "").startswith(("transformers.", "trl."))

    def _collated(self, original: Any, rows: Any) -> Any:
        out = original(rows)
        if self._due is None or self._regular:
            self._guarded(lambda: self._compare(rows, out))
        return out

    def _compare(self, rows: Any, out: Any) -> None:
        if self._due is None and isinstance(out, Mapping):
            self._made += [(n, x, x.clone()) for n, x in out.items() if torch.is_tensor(x)]
        for fault, meant in batch.collated(rows, out, self.trainer, getattr(self._tokenizer, "pad_token_id", None)):
            self._wrong(fault, meant or not known(self.trainer), fault[0], "collator")

    def _fetched(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if self._due is None:
            self._guarded(lambda: self._wrong(batch.overwritten(self._made, out[0])))
            self._made.clear()
        return out

    def _seen(self, read: Callable[[], Taken | None]) -> None:
        if self._taken is not None:
            self._guarded(lambda: self._taken.extend(filter(None, [read()])) if self._taken is not None else None)

    def _logged(self, original: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if nearest(self.trainer) == "kto" and isinstance(kl := logs.get("kl"), float) and kl < 0:
            text = ("the logged kl is below 0", ["it is not clamped at 0"])
            self._guarded(lambda: self._wrong(text, own=not known(self.trainer)))
        if not any(name.startswith("eval_") for name in logs):
            logs.update(self._metrics)
            self._metrics = {}
        return original(logs, *args, **kwargs)

    def _guarded(self, do: Callable[[], None]) -> None:
        """An error of the watch itself ends it, never the run: alone at once, with other ranks where all `_settle`."""
        begun, before = time.perf_counter(), len(self.findings)
        try:
            try:
                do()
            finally:
                if self._measured or len(self.findings) > before:
                    self._write(self.findings[before:])
        except Exception as error:
            self._error = self._error or error
        self.seconds += time.perf_counter() - begun
        if self._alone and self._error is not None:
            self._settle()

    def _settle(self) -> None:
        """What ends the watch on one rank ends it on all, and what ends the run; all come here at the same step."""
        if self._most(self._error is not None):
            self.undo()
            why = "another rank's watch has ended" if self._error is None else told(self._error)
            logger.warning("watch: %s; the run goes on unwatched", why)
            self._error = None
        if self._most(bool(self._mismatch)):
            text, self._mismatch = self._mismatch, ""
            raise Mismatch(text or f"watch, step {self._now + 1}: a mismatch on another rank")

    def _most(self, here: int) -> int:
        """The largest of any rank; whether it is so on any."""
        if self._alone:
            return here
        accelerator = self.trainer.accelerator
        return int(accelerator.gather(torch.tensor([here], device=accelerator.device)).amax())

    def _before_update(self, optimizer: Any) -> None:
        """The gradients of the first step; a copy of the weights where the next steps may have to know them."""
        here = [] if self._stepped or optimizer is None else rates(optimizer)
        # the first that moves weights, and the first at the top
        if here and (not any(self._rates) or at_top(here, self._rates)):
            given = {text: getattr(self.trainer, name, None) for name, text in FIXED.items()}
            others = {text: m for text, m in given.items() if isinstance(m, torch.nn.Module)}
            if others.get("teacher") is self.trainer.model:
                del others["teacher"]  # self-distillation
            self._step_of = (self._step_of or Step(optimizer)).before(self._model, others)
        aged = self._alone and self._generated >= 0 and self._now + 2 >= (self._due or 0)
        if self._now == self._begun and self._scaler is None:
            # of a random model's layers some may be left out
            self._finds("gradient", filter(None, [broken(self._model, self._sloped and not self._random)]))
        if self._now == self._begun and self._step_of is not None:
            for fault in self._step_of.changed():
                self._wrong(fault, not known(self.trainer), "gradient")
        named = {n: p.detach() for n, p in self._model.named_parameters() if p.requires_grad and aged}
        if aged and sum(p.numel() * p.element_size() for p in named.values()) * 2 <= self.budget:
            self._old = [*self._old[-1:], {n: p.to("cpu", copy=True) for n, p in named.items()}]

    def _after_update(self, optimizer: Any) -> None:
        step, here = self._step_of, [] if optimizer is None else rates(optimizer)
        self._stepped, self._rates = at_top(here, self._rates), here
        if step is not None:
            self._step_of = step if self._now == self._begun else None
            self._finds("update", step.faults(self._stepped))
            if self._stepped and (text := step.lost()):
                self._say(("lost",), f"watch, step {self._now + 1}: {text}")

    def _behind(self, step: Step) -> None:
        self._finds("update", step.behind(self._model))
        classes = (c.__name__ for one in self.trainer.callback_handler.callbacks for c in type(one).__mro__)
        for name in () if any(sync in c for c in classes for sync in SYNCS) else step.moved():
            self._say(("moved", name), f"watch: something other than the optimizer has changed weights of the {name}")

    @property
    def _stale(self) -> bool:
        """Whether weights have moved since the completions were generated."""
        return self._generated not in (-1, self._now)

    @property
    def _regular(self) -> bool:
        """Whether this step is one of every so many."""
        return (self._now - self._begun) % self.every == 0

    @property
    def _tokenizer(self) -> Any:
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)

    @property
    def _model(self) -> Any:
        return getattr(self.trainer.model, "_orig_mod", self.trainer.model)

    def _ready(self) -> list[Look]:
        """The micro-batch just scored, if there is anything to look at."""
        taken = trained(self._taken or (), self._inputs.get("completion_ids"))
        if taken is None and known(self.trainer) != "distillation":
            why = "a loss of its own, images or prompt tuning"
            why = "label smoothing" if getattr(self.trainer.args, "label_smoothing_factor", 0) else why
            apart = any(t.trained for t in self._taken or ())
            why = "rows scored apart, in another order or padding than the batch's" if apart else why
            what = "its loss is not watched, only whether gradients are finite, and the optimizer's first step"
            self._say(("nothing",), f"watch: {type(self.trainer).__name__} shows no log-probs ({why}): {what}")
            own = not self._trls(type(self.trainer).compute_loss) or bool(vars(self.trainer).get("compute_loss_func"))
            model = innermost(self.trainer.model)  # one of the user's own may leave padding out itself
            who = self.trainer if own or self._trls(type(model)) else model
            for fault in batch.unscored(self._inputs, self._tokenizer) if self._regular else ():
                self._wrong(fault, own or who is model, fault[0], who=who)
        if not self._stale and self._now < (self._due or 0):
            self._again = False  # there are new ones
        if taken is None or not (self._again if self._stale else self._now >= (self._due or 0)):
            return []
        mask = (loss_mask(self._inputs) if taken.mask is None else taken.mask)[:, -taken.logps.shape[1] :]
        rows = rows_of(taken.ids, taken.attention, mask, self.rows)
        others = [t for t in self._taken or () if not t.trained]
        stored = self._trainings > 1 and getattr(self.trainer.args, "precompute_ref_log_probs", False)
        begins = self._now == self._begun == 0 and not stored  # which are those before an earlier training
        now = self._generated == self._now, self._stale, begins, self._now > self._begun
        random = self._random or drops(self.trainer.model)
        look = Look(self.trainer, self._model, self._inputs, taken, others, mask, rows, *now, random, self._batch)
        return [look] * bool(rows.picked.any())

    def _look(self, at: Look, items: Any, value: float) -> None:
        """Everything about it; its backward pass is done, the optimizer has not stepped."""
        if at.mine is None:
            return
        self._measured = at.measured
        for whose in (missing := at.missing()):
            who = "policy before its updates" if whose == "old" else whose
            self._finds(whose, [f"log-probs of the {who} are NaN"])
        random = "dropout or other noise makes log-probs in training random: those of the trainer are not compared"
        notes = {
            "at step 1 the reference has other weights than the policy: the two are not compared": at.other
            and not self._looked,
            "the config ties the LM head to the embedding, but they are two tensors": at.untied,
            "the model trains in evaluation mode: its dropout drops nothing": at.taken.still
            and drops(self._model, True),
            random: "trainer" not in at.sides,
        }
        for text in (text for text, here in notes.items() if here):
            self._say((text,), f"watch: {text}")
        reference = getattr(self.trainer, "ref_model", None)
        if reference not in (None, self.trainer.model) and reference.training and drops(reference):
            text = "the reference's log-probs are random: it is in training mode, and its dropout drops"
            self._finds("reference", [text])
        self._finds("sampler", at.asked())
        for what in at.sides:
            self._judge(what, at.difference(what), at)
        if at.taken.slopes is not None and not missing:
            self._sloped = self._sloped or bool(at.taken.slopes.any())
            self._loss(at, at.taken.slopes.detach().double().cpu(), items, value)

    def _judge(self, what: str, found: Difference, at: Look) -> None:
        units, trainer = found.units(), at.sides.get("trainer")
        self._measured[f"watch/{what}_units"] = rms(units)
        if what == "sampler" and len(units):
            d = (found.own.logps if trainer is None else trainer) - found.values
            measured = mismatch(d[found.values.isfinite()]) | at.kept_mass()
            self._measured |= {f"sampling/{name}": value for name, value in measured.items()}
        behind = at.behind(what)
        with_it = what != "trainer" and trainer is not None
        if with_it:  # the trainer's finding, if it has one, is theirs
            with_it = not agrees(at.difference("trainer").units()) if behind else agrees(found.units(trainer))
        if agrees(units) or with_it:
            return
        named, tokens, strips, none = tuple[str, ...](), list[dict[str, Any]](), list[str](), "no known cause"
        try:
            tokens = farthest(found, at.rows, self._decoded)
            strips = watched.token_signs(at.rows.back(found.each).nan_to_num(0.0), ~at.rows.picked.cpu())
            named = tuple(causes.explanations(found, at.rows, *at.facts(what, found.own, self._old[::-1])))
        except Exception as error:
            none = f"no cause, for {told(error)}"
        most = ", ".join(f"{t['token']!r} {t['logp']:.3f} for {t['own']:.3f}" for t in tokens[:3])
        side = what if not behind else "later" if what == "reference" else "again"
        size = f"{SIDES[side]} by {rms(units):.3g} times its noise ({len(units)} tokens)"
        self._find(what, rms(units), named, f"{size}: {' or '.join(named) or f'{none}; most: {most}'}", tokens, strips)

    def _valued(self, items: Any, value: float) -> None:
        """A loss without log-probs, distillation's or SFT's by plain logits, of all rows, by its value."""
        if known(self.trainer) == "distillation":
            self._due, self._measured = self._now + self.every, {"tokens": int(loss_mask(self._inputs).sum())}
            self._wrong(definition.distilled(self.trainer, self._model, self._inputs, value))
        elif nearest(self.trainer) == "sft" and not known(self.trainer):
            self._due = self._now + self.every
            try:
                found = definition.summed(self.trainer, self._model, self._inputs, items, value)
                self._wrong(found, own=True, of="value")
            except Exception as error:  # of a model or a batch of the user's own
                self._say(("value",), f"watch: its value is not compared: {told(error)}")

    def _loss(self, at: Look, slopes: Tensor, items: Any, value: float) -> None:
        """The loss, by its value and the gradients of its log-probs; that a loss of the user's own is not TRL's is a note."""
        own = not known(self.trainer)
        for fault in batch.faults(at.taken, at.mask, self._tokenizer):
            self._wrong(fault)
        slopes = slopes / (1.0 if self._scaler is None else self._scaler.get_scale())
        if at.taken.mask is not None:  # log-probs of other tokens are the constant 0
            slopes = slopes * at.mask.cpu()
        why = "its definition is not known here"
        try:
            loss = defined(self.trainer, self._inputs, at.taken, at.mask, at.others, items)
            found = definition.faults(self.trainer, loss, at.taken.logps, slopes, value, own) if loss else None
        except Exception as error:
            if not own:
                raise
            loss, why = None, f"it is made of other things ({told(error)})"
        if loss is None:
            self._say(("unheld",), f"watch: the loss of {type(self.trainer).__name__} is not compared: {why}")
        else:
            self._wrong(found, own)

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer.decode([token])) if hasattr(self._tokenizer, "decode") else str(token)
