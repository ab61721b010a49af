"""Corrected preference losses: DPO's alpha divergence, the likelihood of CPO and ORPO over a window of micro-batches."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler

from parity import data
from parity.case.case import Frozen
from parity.fixes import apply, patches
from parity.registry import run_case, select
from parity.trainers.checks import processes
from parity.trainers.rig import drive, models, recorder, twin_runs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name",
    [
        "dpo-alpha-divergence",
        "cpo-accumulation",
        "orpo-accumulation",
        "tpo-accumulation",
        "async-grpo-accumulation",
        "async-distillation-accumulation",
        "gold-uld-accumulation",
        "iw-opd-server-accumulation",
        "gkd-generated-completions",
    ],
)
def test_after_apply_the_frozen_case_of_the_defect_agrees(name):
    case = Frozen.load(data.cases_dir() / "regressions" / f"{name}.json").case
    rows = list(run_case(case, select([f"{case.family}.released", f"{case.family}.fixed"])))
    verdicts = {path: {r.verdict for r in rows if r.implementation.endswith(path)} for path in ("released", "fixed")}
    assert "disagree" in verdicts["released"] and verdicts["fixed"] == {"agree"}


def built(trainer):
    return twin_runs.Run(trainer, processes.of_processes(trainer)).built


def test_a_micro_batch_without_gold_tokens_trains_as_released():
    """TRL takes a weight of 0 for that of a batch without gold sequences, which is laid out otherwise."""
    texts = {"chosen": "w6 w7", "rejected": "w8", "reference": "w9 w10 w11"}
    rows = [{"prompt": f"{prompt} ", **texts} for prompt in [" ".join(["w5"] * 9)] * 3 + ["w5"] * 3]

    def losses(*fixes):
        options = recorder.plain("3x2") | {"max_length": 8}  # of the first three prompts, whose completions are cut off
        trainer = drive.build("TPOTrainer", models.model("llama"), options, train_dataset=Dataset.from_list(rows))
        trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
        for fix in fixes:
            fix(trainer)
        steps = recorder.train(trainer)
        assert [int(batch["completion_mask"].sum()) for batch in steps.batches] == [0, 27]
        return steps.losses

    released, fixed = losses(), losses(apply)
    assert [math.isnan(x) for x in released] == [math.isnan(x) for x in fixed] == [True, False]


def test_alpha_is_exchanged_for_this_trainer_alone_and_put_back():
    trainer = built("dpo-trainer")
    assert "no alpha divergence" in str(patches.exchange_alpha(trainer))
    trainer.args.f_divergence_type, trainer.f_alpha_divergence_coef = "alpha_divergence", 0.5
    assert "α is 0.5" in str(patches.exchange_alpha(trainer))
    trainer.f_alpha_divergence_coef = 0.3
    first, second = (patches.exchange_alpha(trainer) for _ in range(2))
    assert first and second.reason == "already applied"
    assert trainer.f_alpha_divergence_coef == pytest.approx(0.7)
    second.undo()
    assert trainer.f_alpha_divergence_coef == pytest.approx(0.7)
    first.undo()
    assert trainer.f_alpha_divergence_coef == 0.3


def test_alpha_stays_where_the_loss_is_as_in_the_paper(monkeypatch):
    trainer = built("dpo-trainer")
    trainer.args.f_divergence_type, trainer.f_alpha_divergence_coef = "alpha_divergence", 0.3

    def mended(self, *args):
        return None

    monkeypatch.setattr(type(trainer), "_compute_loss", mended)
    assert "as the paper has it" in str(patches.exchange_alpha(trainer))
    assert trainer.f_alpha_divergence_coef == 0.3


def likelihoods(trainer, batches, training=True):
    """What the trainer makes of each micro-batch of a window."""
    trainer.model.train(training)
    samples, _ = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    return [float(trainer.concatenated_forward(trainer.model, one)[4]) for one in samples]


@pytest.mark.parametrize("name", ["cpo-trainer", "orpo-trainer"])
def test_the_likelihood_of_a_window_is_that_of_its_tokens(name):
    trainer = built(name)
    whole = next(iter(trainer.get_train_dataloader()))
    rows = len(whole["chosen_labels"])
    parts = [{k: v[i : i + 1] for k, v in whole.items()} for i in range(rows)]
    with patches.average_over_window(trainer) as patch:
        assert patch and "already applied" in str(patches.average_over_window(trainer))
        (expected,) = likelihoods(trainer, [whole])
        cut = likelihoods(trainer, parts)
        assert sum(cut) / rows == pytest.approx(expected, rel=1e-6)
        evaluated = likelihoods(trainer, parts, training=False)
    assert evaluated == likelihoods(trainer, parts)  # evaluation as released, and so is training afterwards
    assert sum(evaluated) / rows != pytest.approx(expected, rel=1e-3)


class Distilling:
    """A window of two rows with 3 and 5 labels, of which the training loop counts 16, by two processes."""

    args, lmbda, seq_kd = SimpleNamespace(average_tokens_across_devices=True), 0.0, False
    model, accelerator = SimpleNamespace(training=True), SimpleNamespace(num_processes=2)

    def generate_on_policy_outputs(self):
        return None

    def generalized_jsd_loss(self, num_items_in_batch):
        return num_items_in_batch

    def compute_loss(self, num_items_in_batch):
        return self.generalized_jsd_loss(num_items_in_batch=num_items_in_batch)

    def get_batch_samples(self, batches, count, device):
        return [[3, 5]] * 2, torch.tensor(16)

    def _get_num_items_in_batch(self, batches, device):
        return torch.tensor(sum(batches))


class Keeping(Distilling):
    def _fill_buffer(self, window):
        self._buffered_inputs = window

    def _prepare_inputs(self, window):
        self._fill_buffer(window)
        return window[0]


class Subclass(Keeping):
    def compute_loss(self, *args, **more):
        return super().compute_loss(*args, **more)


@pytest.mark.parametrize(("kind", "right"), [(Distilling, 8.0), (Keeping, 4.0), (Subclass, 4.0)])
def test_tokens_are_counted_once_and_their_mean_taken_over_processes(kind, right):
    trainer = kind()
    with patches.average_over_window(trainer) as patch:
        assert patch and "already applied" in str(patches.average_over_window(trainer))
        for _ in range(2):
            (first, _), items = trainer.get_batch_samples(None, 2, "cpu")
            if kind is not Distilling:
                trainer._prepare_inputs(first)
            assert float(items) == right
    assert set(vars(trainer)) <= {"_buffered_inputs"}
    assert float(trainer.get_batch_samples(None, 2, "cpu")[1]) == 16
