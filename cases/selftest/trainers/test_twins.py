"""The twins against trainers that are wrong on purpose: each fault must show in the quantity that is about it."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from cases.selftest.trainers.asked import rows
from parity.errors import Unsupported
from parity.fixes.accumulation import divide_by_accumulation
from parity.trainers.checks import processes, twin_windows, twins
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.training_step import exact_step, slopes
from parity.trainers.rig import drive, ranks, recorder, stored_window, twin_runs
from parity.trainers.rig.stored_window import Window
from parity.trainers.rig.twin_runs import Run


def test_the_fix_of_the_accumulation_looks_before_it_divides():
    plain = processes.of_processes("sft-trainer")
    for trainer, changed in (("online-dpo-trainer", True), ("sft-trainer", False)):
        run = Run(trainer, plain).built
        original = run.accelerator.backward
        patch = divide_by_accumulation(run)
        assert bool(patch) is changed
        if changed:
            assert "already applied" in str(divide_by_accumulation(run))
            patch.undo()
            run.accelerator.gradient_accumulation_steps = 4  # as older releases of transformers set it
            assert "accelerate divides" in str(divide_by_accumulation(run))
        assert run.accelerator.backward == original


def test_online_dpo_with_the_preference_turned_round(monkeypatch):
    pair = Window.pair
    monkeypatch.setattr(Window, "pair", lambda *given: pair(*given)[::-1])
    twins._by_definition.cache_clear()
    found = rows("online-dpo-trainer", "twins")
    twins._by_definition.cache_clear()
    assert {q for q, row in found.items() if row.verdict == "disagree"} == {"loss", "gradient"}


def test_divided_twice(monkeypatch):
    """What transformers 5.2.0 to 5.5.0 did: accelerate divides by the accumulation steps once more."""
    build = Run.build

    def divided(run, **more):
        trainer = build(run, **more)
        trainer.accelerator.gradient_accumulation_steps = 4
        return trainer

    monkeypatch.setattr(Run, "build", divided)
    found = rows("sft-trainer", "twins", split="2x4")
    assert found["loss"].verdict == "agree"
    assert found["gradient"].verdict == "disagree"
    assert "is 0.25 times the definition's" in found["gradient"].message
    assert "first model.embed_tokens.weight" in found["gradient"].message


def test_a_lost_sequence(monkeypatch):
    dataset = stored_window.dataset
    monkeypatch.setattr(stored_window, "dataset", lambda rows, columns: dataset([*rows[:7], rows[0]], columns))
    found = rows("sft-trainer", "twins", split="2x4")
    assert found["sequences"].verdict == "disagree"
    assert "missing" in found["sequences"].message


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"check": "twins", "frozen": True}, {"gradient", "learning rate has an effect"}),
        ({"check": "adapters"}, {None}),
    ],
)
def test_dead_parameters_are_seen_and_our_fix_revives_them(monkeypatch, asked, wanted):
    """TRL before 0.16 and transformers of its day left out the hook on the input embeddings."""
    monkeypatch.setattr(transformers.PreTrainedModel, "enable_input_require_grads", lambda self: None)
    for path, seen in (("released", wanted), ("fixed", set())):
        found = rows("grpo-trainer", path=path, checkpointing=drive.REENTRANT, **asked)
        assert {q for q, row in found.items() if row.verdict != "agree"} == seen


def test_the_uneven_window_of_online_dpo_by_hand():
    """With our fix (g₁ + g₂)/2 of a micro-batch of two prompts and one of one; as released g₁ + g₂; right is (2g₁ + g₂)/3."""
    trainer, s = "online-dpo-trainer", processes.of_processes("online-dpo-trainer")
    s.split, rows = "2x2", Window.of(trainer).rows[:7]
    epoch = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": False}
    for path, factor in (("fixed", 0.5), ("released", 1.0)):
        run = Run(trainer, s, path, rows, plain=True, **epoch)
        parts = [run.window.found_in([batch]) for batch in run.steps.window(1)]
        assert [len(part.rows) for part in parts] == [2, 1]
        exact = stored_window.policy(s.model, torch.float64)
        first, second = (slopes(exact_step(exact, Loss(part, s))) for part in parts)
        for name, found in run.steps.gradients[1].items():
            expected = factor * (first[name] + second[name])
            assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.fixture
def two_ranks(monkeypatch):
    """What two ranks would do of the window of SFT, told by one process whose window is twice as large."""

    def launched(model="llama", prepare=lambda run: None, **rank):
        run = Run("sft-trainer", twins.twin("sft-trainer", model=model, split="4x2"))
        prepare(run.built)
        own = recorder.sequences_of(run.steps.batches)
        taken = [{n: g.clone() for n, g in run.steps.gradients[0].items()} for _ in range(2)]
        whole = Run("sft-trainer", processes.of_metrics("sft-trainer"), **recorder.LOGGED)
        whole.s.split = "8x1"
        assert whole.steps
        log = drive.logged(whole.built)
        found = [ranks.Rank(taken[i], list(half), dict(log), **rank) for i, half in enumerate((own[:4], own[4:]))]
        monkeypatch.setattr(processes, "_launched", lambda *args: {"sft-trainer": found})
        monkeypatch.setattr(processes, "_metrics", lambda *args: {"sft-trainer": found})
        return found

    return launched


def disagreeing(**settings):
    found = rows("sft-trainer", "processes", **settings)
    return {q: row for q, row in found.items() if row.verdict == "disagree"}


@pytest.mark.parametrize(
    ("quantities", "damage", "sharding"),
    [
        ({"gradient"}, lambda found: [g.mul_(2) for rank in found for g in rank.gradients.values()], "none"),
        ({"ranks"}, lambda found: found[1].gradients["lm_head.weight"].add_(1e-6), "none"),
        ({"sequences"}, lambda found: found[1].sequences.pop(), "none"),
        ({"sequences", "unequal ranks"}, lambda found: [rank.sequences.clear() for rank in found], "none"),
        ({"entropy"}, lambda found: found[0].log.update(entropy=found[0].log["entropy"] / 2), "none"),
        ({"trained"}, lambda found: found.append(ranks.Rank({}, [], failure="RuntimeError: hangs")), "none"),
        ({"sharded"}, lambda found: None, "fsdp2"),
    ],
    ids=["summed", "not reduced", "dropped", "equal", "logged by one", "failed", "whole"],
)
def test_what_two_ranks_may_do_wrong(two_ranks, quantities, damage, sharding):
    damage(two_ranks())
    assert disagreeing(sharding=sharding).keys() == quantities


def test_a_tied_matrix_that_is_sharded_as_two(two_ranks):
    """A wrapper that copies the head instead of sharing the embeddings: each gets its own part of the gradient."""

    def copied(run):
        run.model.lm_head.weight = torch.nn.Parameter(run.model.lm_head.weight.detach().clone())

    two_ranks("qwen2", copied, sharded=1)
    found = disagreeing(sharding="fsdp2", model="qwen2")
    assert found.keys() == {"gradient"} and "first model.embed_tokens.weight" in found["gradient"].message


def test_a_rank_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    with pytest.raises(Unsupported, match="2 ranks failed: exit code 1"):
        ranks.launch(processes.BUILD, {"sft-trainer": {}}, "none", 2)


def test_packed_rows_are_packed():
    run = Run("sft-trainer", twins.twin("sft-trainer", padding="packed", split="1x8"))
    assert len(run.steps.batches) == 2, "eight sequences in two rows"


def test_generated_completions_are_filled_up_with_the_padding_token_of_the_tokenizer():
    """Distillation up to 1.9 calls `model.generate`, which fills up with what the tokenizer pads with, <eos> perhaps."""
    prompt = (5, 6)
    for pad, end, filled in ((1, 1, [7, 1, 1, 1]), (0, 1, [7, 1, 0, 0]), (0, 9, [7, 9, 0, 0]), (1, 9, None)):
        tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=1)
        trainer = SimpleNamespace(processing_class=tokenizer, model=SimpleNamespace())
        stored = {prompt: [[7, end], [7, 8, 8, 1]]}
        if filled is None:
            with pytest.raises(Unsupported, match="does not end with it"):
                twin_runs.generate_in_model(trainer, stored)
            continue
        twin_runs.generate_in_model(trainer, stored)
        ids = torch.tensor([prompt, prompt])
        out = trainer.model.generate(ids, torch.ones_like(ids)).sequences
        assert out[:, 2:].tolist() == [filled, [7, 8, 8, 1]]


def test_the_evaluation_of_early_kto_is_not_judged_by_a_definition_of_another():
    """Up to TRL 1.2: each prompt begins with <bos>, and the KL's pairs are those of training batches."""
    early = SimpleNamespace(eval_dataset=SimpleNamespace(column_names=["answer_input_ids"]))
    with pytest.raises(Unsupported, match="<bos>"):
        list(twin_windows._evaluation(SimpleNamespace(built=early)))


class Trainer:
    def _generate_single_turn(self, prompts):
        prompt_ids, completion_ids, logprobs = prompts, prompts, None
        return prompt_ids, completion_ids, logprobs


class Own(Trainer):
    def _generate_single_turn(self, prompts):
        return super()._generate_single_turn(prompts)


def test_the_names_that_a_user_s_method_hands_on_are_those_of_the_class_it_extends():
    """A method without a source was a worker lost: `inspect.getsource` raises OSError."""
    space = {"__name__": "own"}
    exec("def _generate_single_turn(self, prompts): return None", space)
    unreadable = type("Unreadable", (Own,), {"_generate_single_turn": space["_generate_single_turn"]})
    for trainer in (Trainer(), Own(), unreadable()):
        found = twin_runs.handed_names(trainer, "_generate_single_turn")
        assert found == ["prompt_ids", "completion_ids", "logprobs"]
    with pytest.raises(Unsupported, match="_generate of the installed version does not return completion_ids"):
        twin_runs.handed_names(Own(), "_generate")


def test_a_release_that_writes_conversations_out_where_it_generates_is_not_crashed():
    class Older:
        def _generate_single_turn(self, prompts):
            prompt_ids, completion_ids = prompts, prompts
            return prompt_ids, completion_ids

    trainer = Older()
    twin_runs._hand_out(trainer, stored_window.rows()[:1], None)
    with pytest.raises(Unsupported, match="conversation"):
        trainer._generate_single_turn([[{"role": "user", "content": "w2"}]])
