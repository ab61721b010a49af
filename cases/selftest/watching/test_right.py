"""Right runs that are unusual, in which nothing is found."""

import datasets
import pytest
import torch
import transformers

import parity
from cases.selftest.watching.runs import grpo, of, watched
from parity.trainers.rig import models
from parity.watching import batch

TRAINERS = "dpo-trainer", "sft-trainer", "kto-trainer"


class Parts(torch.optim.Optimizer):
    """SGD with copies in float64 of matrices, and other parameters as they are."""

    def __init__(self, params):
        params = list(params)
        self.copies = [(p, p.detach().double().clone()) for p in params if p.dim() > 1]
        super().__init__([p for p in params if p.dim() < 2] + [copy for _, copy in self.copies], {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p, copy in self.copies:
            copy.grad = p.grad.double()
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1e-2)
        for p, copy in self.copies:
            p.copy_(copy)


def collating(trainer, change):
    """The trainer, whose collator changes what it makes."""
    made = trainer.data_collator
    trainer.data_collator = lambda rows: change(made(rows))
    return trainer


def within_backward(trainer):
    def step(p):
        with torch.no_grad():
            p.add_(p.grad, alpha=-1e-3)
        p.grad = None

    for p in trainer.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return trainer


@pytest.mark.parametrize("make", [lambda: of("dpo-trainer"), grpo])
def test_an_optimizer_that_steps_within_the_backward_pass_ends_the_watch(make, tmp_path, said):
    assert not watched(within_backward(make()), tmp_path)[0].findings
    assert [line for line in said if "steps within the backward pass; the run goes on unwatched" in line]


def test_an_optimizer_with_copies_of_some_parameters(tmp_path, said):
    trainer = of("sft-trainer", max_steps=3)
    trainer.optimizer = Parts(trainer.model.parameters())
    assert not watched(trainer, tmp_path)[0].findings


@pytest.mark.parametrize("name", ["dpo-trainer", "kto-trainer"])
def test_stored_references_of_a_policy_that_is_trained_again(name, tmp_path, said):
    trainer = of(name, precompute_ref_log_probs=True, learning_rate=1e-2)
    watch, _ = watched(trainer, tmp_path)
    trainer.train()
    assert not watch.findings


def test_layers_that_are_left_out_by_chance(tmp_path, said):
    tokens = models.own_tokenizer()
    sizes = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    config = transformers.OPTConfig(
        vocab_size=len(tokens), **sizes, layerdrop=0.5, dropout=0.0, pad_token_id=tokens.pad_token_id
    )
    torch.manual_seed(0)
    assert not watched(of("sft-trainer", model=transformers.OPTForCausalLM(config), max_steps=4), tmp_path)[0].findings
    assert any("random" in line for line in said)


def test_a_batch_with_missing_numbers_is_not_written_over(tmp_path, said):
    def scores(made):
        return {
            **made,
            **dict(zip("ab", torch.full((len(made["input_ids"]), 2), torch.nan).unbind(1), strict=True)),
        }

    assert not watched(collating(of("dpo-trainer"), scores), tmp_path)[0].findings


def test_views_of_one_tensor_are_not_written_over():
    both = torch.arange(8).view(2, 1, 4)
    given = {"input_ids": both[0], "labels": both[1]}
    made = [(n, x, x.clone()) for n, x in given.items()]
    given["labels"][0, 0] = -100
    assert batch.overwritten(made, [given]) is None


def test_a_collator_that_cuts_at_a_length_of_its_own(tmp_path, said):
    trainer = of("dpo-trainer")
    trainer.data_collator.max_length = 9
    assert not watched(trainer, tmp_path)[0].findings


@pytest.mark.filterwarnings("ignore:The `'keep_end'")
def test_a_completion_that_the_prompt_has_too(tmp_path, said):
    torch.manual_seed(0)
    rows = []
    for _ in range(8):
        a, b, c, d = (torch.randint(5, 50, (n,)).tolist() for n in (12, 3, 2, 10))
        rows.append({"prompt_ids": b + a + [1] + c, "chosen_ids": [*a, 1], "rejected_ids": [*d, 1]})
    trainer = of("dpo-trainer", max_length=10, truncation_mode="keep_end")
    trainer.train_dataset = datasets.Dataset.from_list(rows)
    assert not watched(trainer, tmp_path)[0].findings


def test_one_text_with_both_labels(tmp_path, said):
    trainer = of("kto-trainer")
    row = trainer.train_dataset[0]
    trainer.train_dataset = datasets.Dataset.from_list([{**row, "label": bool(i % 2)} for i in range(8)])
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: collator(rows[::-1])
    assert not watched(trainer, tmp_path)[0].findings


@pytest.mark.parametrize("name", TRAINERS)
def test_nothing_stays_of_a_training_that_an_error_ends(name, tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            raise KeyboardInterrupt

    trainer = of(name)
    trainer.add_callback(Stops())
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stops)
    trainer.train()
    watch.undo()
    assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())
