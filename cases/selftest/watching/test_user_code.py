"""`parity.watch` of trainers that a user changed, stopped, resumed or watches twice: never an error, no false alarm."""

import copy
import functools
import html
import json
import pickle
from unittest import mock

import pytest
import torch
from accelerate.state import GradientState
from transformers import TrainerCallback

import parity
from cases.selftest.watching.runs import grpo, of, sampler, scored, watched
from parity.registry import loss_family
from parity.results import watched as watched_files
from parity.rollouts import scoring
from parity.sampling.find import find
from parity.trainers.rig import models
from parity.upstream import trl
from parity.watching.watch import Mismatch, Watch

RAW = functools.partial(sampler, raw=True)
"""Of a trainer with another temperature: each look has a finding."""


def subclassed(trainer, **methods):
    trainer.__class__ = type("Users", (type(trainer),), methods)
    return trainer


def run(trainer, **options):
    with trl.quiet():
        trainer.train(**options)


class Between(TrainerCallback):
    """Calls a function after the first step, and keeps what it returns."""

    def __init__(self, do):
        self.do = do

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.made = self.do()


def watched_from_step_2(trainer, tmp_path):
    between = Between(lambda: parity.watch(trainer, to=tmp_path / "watch.ndjson"))
    trainer.add_callback(between)
    run(trainer)
    return between.made


def doubled(self, *args, **kwargs):
    return super(type(self), self).compute_loss(*args, **kwargs) * 2


def own_step(self, model, inputs, *args):
    loss = self.compute_loss(model.train(), self._prepare_inputs(inputs))
    self.accelerator.backward(3 * loss)
    return loss.detach()


@pytest.mark.parametrize("methods, factor", [({"compute_loss": doubled}, 2), ({"training_step": own_step}, 3)])
def test_a_loss_of_the_users_own_is_no_finding_and_said_where_a_cause_is_known(tmp_path, said, methods, factor):
    watch, lines = watched(subclassed(grpo(sampler), **methods), tmp_path)
    assert not watch.findings and len(lines) == 2
    text = f"gradients of the log-probs are not those of dapo: {factor} times the definition's"
    assert said == [f"watch, step 1: {text}; Users has a loss of its own: no finding, if you meant that"]


def clamped(self, model, inputs):
    inputs = inputs | {"advantages": inputs["advantages"].clamp(-0.5, 0.5)}
    return super(type(self), self)._compute_loss(model, inputs)


def some_tokens(self, model, inputs):
    most = torch.ones_like(inputs["completion_mask"])
    most[:, 0] = 0
    return super(type(self), self)._compute_loss(model, inputs | {"tool_mask": most})


def same(self, model, inputs):
    return super(type(self), self)._compute_loss(model, inputs) + 0.1


def other_inputs(self, model, inputs):
    loss = super(type(self), self)._compute_loss(model, dict(inputs))
    inputs.pop("advantages")
    return 2 * loss


@pytest.mark.parametrize(
    "own, text",
    [
        (clamped, "of their norm apart): no known cause; Users has a loss of its own: no finding, if you meant that"),
        (some_tokens, "8 tokens of the loss have none; Users has a loss of its own"),
        (same, None),
        (other_inputs, "the loss of Users is not compared: it is made of other things (KeyError: 'advantages')"),
    ],
)
def test_how_a_loss_of_the_users_own_differs_is_said_once_and_no_finding(tmp_path, said, own, text):
    watch, lines = watched(subclassed(grpo(sampler), _compute_loss=own), tmp_path)
    assert not watch.findings and len(lines) == 2
    assert [text in line for line in said] == ([True] if text else [])


def test_a_beta_that_a_loss_ignores_is_said(tmp_path, said):
    def free(self, model, inputs):
        with mock.patch.object(self, "beta", 0.0):
            return super(type(self), self)._compute_loss(model, inputs)

    watched(subclassed(grpo(sampler, beta=0.5, learning_rate=0.1), _compute_loss=free), tmp_path)
    assert len(said) == 1 and ": beta is ignored: there is no KL; Users has" in said[0]


def by_logits(self, model, inputs, *args, **kwargs):
    with torch.no_grad():  # for a metric
        super(type(self), self).compute_loss(model, dict(inputs), *args, **kwargs)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


@pytest.mark.parametrize(
    "made, text",
    [
        (
            lambda: subclassed(of("sft-trainer"), compute_loss=by_logits),
            "Users shows no log-probs (a loss of its own, ",
        ),
        (
            lambda: in_turn(-1),
            "Users shows no log-probs (rows scored apart, in another order or padding than the batch's): ",
        ),
        (lambda: of("sft-trainer", label_smoothing_factor=0.1), "SFTTrainer shows no log-probs (label smoothing): "),
    ],
)
def test_a_loss_that_shows_no_log_probs_is_said_not_to_be_watched_and_why(tmp_path, said, made, text):
    """By logits, beside a metric of log-probs; of rows scored one by one; with smoothed labels."""
    watch, lines = watched(made(), tmp_path)
    assert not watch.findings and not lines and [line.startswith(f"watch: {text}") for line in said] == [True]
    assert said[0].endswith(
        "its loss is not watched, only whether gradients are finite, and the optimizer's first step"
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_that_trains_in_evaluation_mode_is_said_where_it_has_dropout(tmp_path, said, dropout):
    trainer = of("sft-trainer", peft=trl.lora(lora_dropout=dropout))
    trainer.model.train = lambda mode=True: trainer.model
    trainer.model.eval = functools.partial(type(trainer.model).train, trainer.model, False)
    trainer.model.eval()
    watch, _ = watched(trainer, tmp_path)
    assert not watch.findings
    assert said == ["watch: the model trains in evaluation mode: its dropout drops nothing"] * (dropout > 0)


def by_rows(self, model, inputs, order):
    rows = range(len(inputs["prompt_ids"]))[::order]
    each = [{n: x[i : i + 1] if torch.is_tensor(x) and x.ndim else x for n, x in inputs.items()} for i in rows]
    return sum(super(type(self), self)._compute_loss(model, one) for one in each)


def in_turn(order):
    return subclassed(grpo(sampler), _compute_loss=functools.partialmethod(by_rows, order=order))


def test_rows_that_are_scored_one_by_one_are_watched_in_the_batchs_order(tmp_path, said):
    watch, lines = watched(in_turn(1), tmp_path)
    assert not watch.findings and not said and len(lines) == 2


def test_a_loss_that_scores_once_more_for_its_kl_is_held_against_the_definition(tmp_path, said):
    def apart(self, model, inputs):
        d = inputs["ref_per_token_logps"] - scored(self, model, inputs)
        with mock.patch.object(self, "beta", 0.0):
            loss = super(type(self), self)._compute_loss(model, inputs)
        kl = ((d.exp() - d - 1) * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()
        return loss + self.beta * (kl if self.right else kl.detach()) / self.current_gradient_accumulation_steps

    wanted = {"beta": 0.5, "learning_rate": 0.1, "loss_type": "bnpo", "use_bias_correction_kl": False}
    for right in (True, False):
        trainer = subclassed(grpo(**wanted), _compute_loss=apart, right=right)
        watched(trainer, tmp_path)
        assert len(said) == (not right)
    assert said[0].startswith("watch, step 2: gradients of the log-probs are not those of bnpo: beta is ignored")


def test_old_log_probs_that_are_scored_again_are_found_where_completions_are_used_again(tmp_path):
    def again(self, batch):
        inputs = dict(super(type(self), self)._prepare_inputs(batch))
        with torch.no_grad():
            return inputs | {"old_per_token_logps": scored(self, self.model, inputs)}

    wanted = {"num_iterations": 2, "learning_rate": 0.1, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    watch, lines = watched(grpo(**wanted), tmp_path, every=50)
    assert not watch.findings and ["watch/old_units" in line for line in lines] == [True, True]
    watch, _ = watched(subclassed(grpo(**wanted), _prepare_inputs=again), tmp_path)
    assert [(f.what, f.causes, f.text[:13]) for f in watch.findings] == [
        ("old", ("they are scored again",), "watch, step 2")
    ]


def test_a_cause_that_cannot_be_asked_hides_no_finding(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such head")

    monkeypatch.setattr(scoring, "bare_head", broken)
    watch, lines = watched(grpo(RAW, temperature=0.7), tmp_path)
    assert len(watch.findings) == 2 and len(lines) == 2
    assert "no cause, for RuntimeError: no such head; most: " in watch.findings[0].text


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, said):
    (tmp_path / "file").write_text("")
    trainer = grpo(RAW, temperature=0.7)
    watch = parity.watch(trainer, every=1, to=tmp_path / "file" / "watch.ndjson")
    run(trainer)
    assert len(watch.findings) == 2 and trainer.state.global_step == 2
    assert [line.partition(":")[2].partition(":")[0] for line in said if "written" in line] == [" nothing is written"]


def test_a_page_that_fails_ends_the_watch_and_not_the_run(tmp_path, said, monkeypatch):
    monkeypatch.setattr(watched_files, "write", lambda *_: "\udc80".encode())
    trainer = grpo(RAW, temperature=0.7)
    watched(trainer, tmp_path)
    assert trainer.state.global_step == 2
    assert [line for line in said if "UnicodeEncodeError" in line and "the run goes on unwatched" in line]


def test_a_mismatch_that_is_raised_is_in_the_file_and_the_run_may_go_on(tmp_path):
    trainer = grpo(RAW, temperature=0.7, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    watch = parity.watch(trainer, every=1, on_mismatch="raise", to=tmp_path / "watch.ndjson")
    with pytest.raises(Mismatch, match="raw log-probs"):
        run(trainer)
    (line,) = (json.loads(line) for line in (tmp_path / "watch.ndjson").read_text().splitlines())
    assert [f["what"] for f in line["findings"]] == ["sampler"]
    run(trainer)
    assert trainer.state.global_step == 2 and len(watch.findings) == 3


def test_the_batch_that_differs_is_a_case_and_its_page_has_the_tokens(tmp_path):
    watch, _ = watched(grpo(RAW, temperature=0.7, max_steps=1), tmp_path, every=50, capture=True)
    (file,) = tmp_path.glob("*.json")
    case, _ = find(str(file), tmp_path)
    assert file.name == "watch-step-1.json" and case.family == "policy"
    assert loss_family("policy").build(case).tensors["sampling_logps"].shape == (8, 8)
    page = html.unescape((tmp_path / "watch.html").read_text())
    assert watch.findings[0].text in page and '<i class="e9">' in page and page.count('aria-label="sequence') == 8


def test_a_clean_run_leaves_no_case_and_no_page(tmp_path):
    watched(grpo(sampler), tmp_path, capture=True)
    assert [file.name for file in tmp_path.iterdir()] == ["watch.ndjson"]


def test_a_batch_that_cannot_be_a_case_is_said_and_the_run_goes_on(tmp_path, said):
    trainer = of("dpo-trainer")
    watched(trainer, tmp_path, capture=True)
    assert trainer.state.global_step == 2
    assert len(said) == 1 and "no case is written: UsageError: capture: DPOTrainer" in said[0]


def test_a_step_that_fails_while_its_batch_is_kept_fails_once(tmp_path):
    calls = []

    def full(self, *args, **kwargs):
        calls.append(self.state.global_step)
        raise OSError("no space left")

    trainer = subclassed(grpo(sampler), compute_loss=full)
    parity.watch(trainer, to=tmp_path / "watch.ndjson", capture=True)
    with pytest.raises(OSError, match="no space left"):
        run(trainer)
    assert calls == [0]


def test_each_training_is_watched_from_its_first_step(tmp_path):
    trainer = grpo(RAW, temperature=0.7)
    watch, _ = watched(trainer, tmp_path, every=50)
    run(trainer)
    assert [f.text.partition(":")[0] for f in watch.findings] == ["watch, step 1", "watch, step 2"] * 2


def test_a_policy_that_trains_again_has_left_its_reference(tmp_path, said):
    trainer = grpo(beta=0.04, learning_rate=0.1, max_steps=1)
    watch, _ = watched(trainer, tmp_path, every=50)
    run(trainer)
    assert not watch.findings and not said


def test_a_watch_that_begins_or_ends_in_the_run(tmp_path):
    begun = watched_from_step_2(grpo(RAW, temperature=0.7), tmp_path)
    assert [f.text.partition(":")[0] for f in begun.findings] == ["watch, step 2"]
    trainer = grpo(RAW, temperature=0.7)
    watch = parity.watch(trainer, every=1, to=tmp_path / "watch.ndjson")
    trainer.add_callback(Between(watch.undo))
    run(trainer)
    assert len(watch.findings) == 1


def test_one_that_begins_between_updates_of_one_generation_waits_for_the_next(tmp_path):
    trainer = grpo(sampler, num_iterations=2, max_steps=3, learning_rate=0.1)
    assert not watched_from_step_2(trainer, tmp_path).findings
    assert [json.loads(line)["step"] for line in (tmp_path / "watch.ndjson").read_text().splitlines()] == [3]


def test_of_two_watches_one_is_undone(tmp_path):
    trainer = grpo(RAW, temperature=0.7)
    first, second = (parity.watch(trainer, every=1, to=tmp_path / name) for name in ("first", "second"))
    first.undo()
    run(trainer)
    assert not first.findings and not (tmp_path / "first").exists() and len(second.findings) == 2


def test_a_watch_that_ends_skips_nobodys_callback(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("a fault of the watch")

    class After(TrainerCallback):
        steps = 0

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.steps += 1

    monkeypatch.setattr(Watch, "_before_update", broken)
    trainer, after = grpo(sampler), After()
    parity.watch(trainer, to=tmp_path / "watch.ndjson")
    trainer.add_callback(after)
    run(trainer)
    assert after.steps == 2


@pytest.mark.parametrize("name", ["grpo", "sft-trainer"])
def test_a_copy_of_a_watched_trainer_is_watched_by_itself(tmp_path, name):
    """By its methods, or by hooks on its models."""
    trainer = grpo(RAW, temperature=0.7, max_steps=1) if name == "grpo" else of(name, max_steps=1)
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    copied = copy.deepcopy(trainer)
    (theirs,) = (c for c in copied.callback_handler.callbacks if isinstance(c, Watch))
    run(copied)
    assert "watch/trainer_units" in theirs._looked[0] and not watch._looked
    theirs.undo()
    run(trainer)
    assert len(theirs._looked) == len(watch._looked) == 1
    watch.undo()
    assert not trainer.model._forward_hooks


def test_a_copy_of_a_watched_model_goes_without_the_trainer(tmp_path):
    def refused(self, memo):
        raise TypeError("nobody copies a trainer")

    trainer = subclassed(of("sft-trainer", max_steps=1), __deepcopy__=refused)
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    ids = torch.arange(3, 9, device=trainer.model.device)[None]
    assert copy.deepcopy(trainer.model)(input_ids=ids).logits.shape[1] == 6
    run(trainer)
    assert "watch/trainer_units" in watch._looked[0]


def test_a_watched_trainer_can_be_pickled_as_far_as_trl_goes(tmp_path):
    """GRPOTrainer cannot; others of 1.16 cannot train afterwards, nor be pickled after what a training leaves in accelerate."""
    GradientState._reset_state()
    trainer = of("dpo-trainer", max_steps=1)
    parity.watch(trainer, to=tmp_path / "watch.ndjson")
    copied = pickle.loads(pickle.dumps(trainer))
    (theirs,) = (c for c in copied.callback_handler.callbacks if isinstance(c, Watch))
    assert theirs.trainer is copied
    theirs.undo()
    assert not {"training_step", "log"} & vars(copied).keys() and not copied.model._forward_hooks
    assert {"training_step", "log"} <= vars(trainer).keys() and trainer.model._forward_hooks


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "vespo"])
def test_a_micro_batch_without_tokens_is_no_look(tmp_path, loss_type):
    wanted = {"mask_truncated_completions": True, "max_completion_length": 3, "loss_type": loss_type}
    watch, lines = watched(grpo(sampler, **wanted), tmp_path, every=50)  # all completions of step 1 are truncated
    assert not watch.findings and [(line["step"], line["tokens"]) for line in lines] == [(2, 3)]


def test_tokens_without_a_log_prob_of_the_sampler_are_left_out(tmp_path):
    def holes(logps):
        return logps.masked_fill(torch.arange(len(logps)) % 3 == 0, torch.nan)

    watch, lines = watched(grpo(functools.partial(sampler, change=holes)), tmp_path)
    assert not watch.findings and lines[0]["watch/sampler_units"] > 0
    watch, _ = watched(grpo(functools.partial(RAW, change=holes), temperature=0.7), tmp_path)
    cause = "temperature 1 (raw log-probs: none is applied) where the trainer's is 0.7"
    assert {cause} == {cause for f in watch.findings for cause in f.causes}


def test_old_log_probs_of_later_updates_may_differ(tmp_path):
    watch, lines = watched(grpo(sampler, num_iterations=3, max_steps=6, learning_rate=0.1), tmp_path)
    assert not watch.findings and [line["step"] for line in lines] == [1, 2, 4, 5]
    assert [line["step"] for line in lines if "watch/old_units" in line] == [1, 2, 4, 5]


def test_dropout_is_said_once_and_the_loss_is_looked_at(tmp_path, said):
    policy = copy.deepcopy(models.model("llama"))
    policy.config.attention_dropout = 0.1
    trainer = grpo(policy=policy)
    original = trainer._compute_loss
    trainer._compute_loss = lambda *args: original(*args) * 2
    watch, _ = watched(trainer, tmp_path)
    assert said[0].startswith("watch: dropout or other noise") and len(said) == 2
    assert {f.what for f in watch.findings} == {"loss"}


@pytest.mark.parametrize(
    "name, wanted, changed",
    [
        ("grpo", {"num_iterations": 2, "learning_rate": 0.1}, {"epsilon_low": 0.01, "epsilon_high": 0.02}),
        ("grpo", {"num_iterations": 2, "learning_rate": 0.1, "beta": 0.04}, {"beta": 0.5, "loss_type": "bnpo"}),
        ("dpo-trainer", {}, {"beta": 0.9, "label_smoothing": 0.2}),
        ("dpo-trainer", {}, {"loss_types": ["ipo", "sigmoid"], "loss_weights": [0.3, 0.2]}),
        ("kto-trainer", {}, {"beta": 0.9, "undesirable_weight": 2.0}),
    ],
)
def test_settings_that_change_as_it_trains_are_the_trainers_own(tmp_path, name, wanted, changed):
    trainer = grpo(**wanted) if name == "grpo" else of(name, **wanted)
    vars(trainer).update(changed)
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and len(lines) == 2


def test_noise_that_is_no_dropout_is_said_and_not_found(tmp_path, said):
    trainer = of("sft-trainer", neftune_noise_alpha=5.0)
    watch, lines = watched(trainer, tmp_path)
    assert [line.partition(":")[2] for line in said] == [
        " dropout or other noise makes log-probs in training random: those of the trainer are not compared"
    ]
    assert not watch.findings and not any("watch/trainer_units" in line for line in lines)


def test_modes_and_what_a_forward_as_in_training_moves_are_put_back():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5).eval())
    before = copy.deepcopy(model.state_dict())
    with scoring.undisturbed(model, training=True):
        assert [m.training for m in model.modules()] == [True, True, False]
        model(torch.arange(8.0).view(4, 2))
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    with scoring.undisturbed(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == [True, True, False]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    "name, kl, found", [("kto-trainer", -0.02, 1), ("kto-trainer", 0.0, 0), ("rloo-trainer", -0.02, 0)]
)
def test_a_kl_that_ktos_clamp_would_not_let_through_is_found_whenever_it_is_logged(tmp_path, name, kl, found):
    trainer = of(name)
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    trainer.log({"loss": 1.0, "kl": kl})
    assert [f.causes for f in watch.findings] == [("it is not clamped at 0",)] * found
