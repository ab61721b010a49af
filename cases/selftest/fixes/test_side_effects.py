"""What a patch leaves alone: other trainers, other holders, copies, what is saved; and what it says instead of failing."""

import copy
import pickle
import types

import peft
import pytest
import torch
import transformers
from trl.models import utils as model_utils
from trl.trainer import utils as trl_utils

from cases.selftest.fixes.test_logits import IDS, halved
from parity.fixes import apply, patches
from parity.fixes.logits import head_in_float32
from parity.trainers.definitions import decoder
from parity.trainers.rig import drive, models, stored_window

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
LABELS = IDS.masked_fill(torch.arange(8) < 3, -100)


def built(name, policy=None, ref_model=None, **settings):
    more = {} if ref_model is None else {"ref_model": ref_model}
    wanted = {"gradient_checkpointing": False, **settings}
    return drive.build(name, policy if policy is not None else models.model("llama"), wanted, **more)


def scores(model, **more):
    return model(input_ids=IDS, labels=LABELS, fused_lm_head=True, **more).log_probs.detach()


@pytest.fixture(scope="module")
def grpo():
    return built("GRPOTrainer", beta=0.04)


def test_policy_and_reference_are_scored_by_one_kernel_with_the_patch_and_without(grpo):
    """After `apply(grpo)` DPO scored its reference with our kernel and its policy with TRL's."""
    released = scores(grpo.model)
    with apply(grpo) as applied:
        assert len(applied["use_selective_log_probs"]) == 2
        assert torch.equal(scores(grpo.model), scores(grpo.ref_model))
        assert not torch.equal(scores(grpo.model), released)
        policy, reference = (models.model("llama", torch.bfloat16) for _ in range(2))
        dpo = built("DPOTrainer", policy, ref_model=reference)
        assert torch.equal(scores(dpo.model), scores(dpo.ref_model))
        dpo.train()
    entry = drive.logged(dpo)
    assert entry["rewards/chosen"] == entry["rewards/rejected"] == 0.0
    assert torch.equal(scores(grpo.model), released)


def test_undoing_one_trainer_leaves_the_other_its_patches(grpo):
    """apply(A), apply(B), A.undo() took B's kernel away."""
    other = built("GRPOTrainer", beta=0.04)
    released = scores(other.model)
    first, second = apply(grpo), apply(other)
    patched = scores(other.model)
    assert not torch.equal(patched, released)
    first.undo()
    assert torch.equal(scores(other.model), patched)
    second.undo()
    assert torch.equal(scores(other.model), released)
    assert isinstance(trl_utils._ChunkedLogProbFunction, type)


class Loops:
    """A trainer whose step runs its backward pass itself and divides nothing, and logs log-probs of padding."""

    def __init__(self, model):
        self.model, self.ref_model, self.args = model, None, types.SimpleNamespace(gradient_accumulation_steps=4)
        self.accelerator = types.SimpleNamespace(
            gradient_accumulation_steps=1, backward=lambda loss, **_: loss.backward(), unwrap_model=lambda m: m
        )

    def _forward(self, completion_mask):
        return torch.ones_like(completion_mask, dtype=torch.float32)

    def training_step(self, logprobs, ref_logprobs, loss):
        kl = logprobs - ref_logprobs
        self.accelerator.backward(loss)
        return kl


def frozen_inputs():
    model = models.model("llama")
    model.get_input_embeddings().requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.get_input_embeddings()._forward_hooks.clear()  # transformers 5 adds one of its own
    return model


def checkpointing_is_kept(model=None):
    model = models.model("llama").train() if model is None else model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own = object()
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = own
    with model_utils.disable_gradient_checkpointing(model, {"use_reentrant": False}):
        pass
    return all(layer._gradient_checkpointing_func is own for layer in model.model.layers)


def padded_on_the_left(ids):
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: torch.nn.functional.pad(x, (3, 0)) for name, x in rows.items()}


def shared(name):
    """How each of two owners asks for a patch of what they share, and how to see that it is in force."""
    kinds = {"use_model_logits": "recurrent_gemma", "move_padding_right": "gpt2", "scale_logits": "granite_vision"}
    model = frozen_inputs() if name == "require_input_grads" else models.model(kinds.get(name, "llama"))
    if name == "merge_into_copies":
        model = stored_window.adapted(model, stored_window.TRAINED)
    trainer = Loops(model)
    trainer.use_vllm = True
    owners = trainer, copy.copy(trainer)
    if name == "keep_gradient_checkpointing":
        return [patches.keep_gradient_checkpointing] * 2, checkpointing_is_kept
    takes = [lambda o=o: getattr(patches, name)(o) for o in owners]
    if name == "require_input_grads":
        return takes, lambda: owners[0].model.get_input_embeddings()(IDS).requires_grad
    if name == "move_padding_right":
        alone, padded = model(input_ids=IDS).logits, padded_on_the_left(IDS)
        return takes, lambda: torch.allclose(model(**padded).logits[:, 3:], alone, atol=1e-4)
    if name == "scale_logits":
        raw = model(input_ids=IDS).logits
        return takes, lambda: torch.equal(model(input_ids=IDS).logits, raw / 4)
    if name == "merge_into_copies":
        return takes, lambda: "merge_adapter" in vars(model)
    if name == "divide_by_accumulation":

        def divides():
            x = torch.ones((), requires_grad=True)
            owners[0].training_step(x, x, x * 1.0)
            return x.grad == 0.25

        return takes, divides
    trl_utils.add_fused_lm_head(owners[0].model)
    released = scores(owners[0].model)
    return takes, lambda: not torch.equal(scores(owners[0].model), released)


OF_ONE = {"mask_padded_log_probs", "exchange_alpha", "average_over_window"}
SHARED = sorted(set(patches.__all__) - {"Patch"} - OF_ONE)


@pytest.mark.parametrize("name", SHARED)
def test_what_two_share_stays_until_both_have_let_go(name):
    """For every patch of something that two trainers may share, a function of TRL included."""
    (first_takes, second_takes), in_force = shared(name)
    assert not in_force()
    first = first_takes()
    assert first
    assert in_force()
    second = second_takes()
    assert not second
    first.undo()
    first.undo()
    assert in_force()
    second.undo()
    assert not in_force()
    with first_takes() as again:
        assert again
        assert in_force()
    assert not in_force()


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma", "deepseek_v4"])
def test_padding_on_the_left_has_no_effect_on_a_row(name):
    """Nor on its hidden states and its gradients; calls that say where tokens stand are left as they are."""
    assert "changes nothing" in patches.move_padding_right(models.model("llama")).reason
    model, padded = models.model(name).eval(), padded_on_the_left(IDS)
    own = {"position_ids": torch.arange(IDS.shape[1] + 3).expand(len(IDS), -1)} if name != "recurrent_gemma" else {}

    def taken(inputs, columns):
        found = model(**inputs, use_cache=False, output_hidden_states=True)
        model.zero_grad()
        found.logits[:, columns].square().mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return [found.logits[:, columns], *(h[:, columns] for h in found.hidden_states), gradients]

    alone, places = taken({"input_ids": IDS}, slice(0, None)), slice(3, None)
    assert not torch.allclose(taken(padded, places)[0], alone[0], atol=0.1)
    given = model(**padded, **own).logits
    with patches.move_padding_right(model):
        for mine, right in zip(taken(padded, places), alone, strict=True):
            assert torch.allclose(mine, right, atol=1e-4)
        assert not own or torch.equal(given, model(**padded, **own).logits)
        # a virtual token before the padding
        behind = [torch.cat([x[:, 3:4], x[:, :3], x[:, 4:]], 1) for x in padded.values()]
        found = model(**dict(zip(padded, behind, strict=True)), use_cache=False).logits
        assert torch.allclose(torch.cat([found[:, :1], found[:, 4:]], 1), alone[0], atol=1e-4)
    assert torch.equal(given, model(**padded, **own).logits)


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PromptEncoderConfig])
def test_virtual_tokens_stand_at_one_distance_whatever_the_padding(kind):
    """Rotary positions count the padding between them and the prompt; without virtual tokens they do not matter."""
    model = peft.get_peft_model(models.model("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    padded, alone = padded_on_the_left(IDS), model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    assert not torch.allclose(model(**padded).logits[:, 6:], alone[:, 3:], atol=1e-2)
    with patches.move_padding_right(model) as patch:
        assert patch and torch.allclose(model(**padded).logits[:, 6:], alone[:, 3:], atol=1e-4)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    found = patches.move_padding_right(peft.get_peft_model(models.model("llama"), prefix))
    assert "does not change" in found.reason, "keys and values are a cache, which is not moved"
    model = peft.get_peft_model(models.model("gpt2"), prefix).eval()
    with patches.move_padding_right(model), model.disable_adapter():  # the reference
        alone = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
        assert torch.allclose(model(**padded).logits[:, 3:], alone, atol=1e-4)


@pytest.mark.parametrize("name", models.VISION)
def test_a_model_of_images_scales_its_logits(name):
    """As its text model's config asks; TRL's fused head, which reads the weight and the config, gives the same then."""
    model = models.model(name).eval()
    row = IDS[0].tolist()
    (right,) = decoder.logits(models.model(name, torch.float64), name, [row])
    trl_utils.add_fused_lm_head(model)
    assert patches.use_model_logits(copy.deepcopy(model)), "the two differ"
    with patches.scale_logits(model) as patch:
        assert patch and torch.allclose(model(input_ids=IDS[:1]).logits[0].double(), right, atol=1e-4)
        assert not patches.use_model_logits(model)
    assert not torch.allclose(model(input_ids=IDS[:1]).logits[0].double(), right, atol=1e-1)


def test_logits_that_a_forward_scales_are_scaled_once():
    for name, reason in {"granite": "text model", "cohere": "text model", "gemma3": "no logits"}.items():
        assert reason in patches.scale_logits(models.model(name)).reason
    model = models.model("granite_vision")
    patches.scale_logits(model)
    assert "already" in patches.scale_logits(model).reason
    mended = models.model("granite_vision")
    mended.lm_head.register_forward_hook(lambda head, args, out: out / 4)
    assert "are its text model's" in patches.scale_logits(mended).reason
    other = models.model("granite_vision")
    other.lm_head.register_forward_hook(lambda head, args, out: out.tanh())
    assert "more than a scale" in patches.scale_logits(other).reason


def test_what_a_config_scales_besides_logits_is_left_alone():
    """MiniCPM3 divides the hidden states, so that its head gives the logits; MPT ignores its scale, which may be a word."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    small = transformers.MiniCPM3Config(**sizes, **latent, num_key_value_heads=2, dim_model_base=2)
    words = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64, logit_scale="inv_sqrt_d_model")
    for config in (small, words):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert not patches.scale_logits(model)
        trl_utils.add_fused_lm_head(model)
        apply(types.SimpleNamespace(model=model)).undo()


def test_a_scaled_head_multiplies_in_float32_where_the_trainer_asks_for_it():
    model = models.model("granite_vision", torch.bfloat16)
    with patches.scale_logits(model) as patch, head_in_float32(model):
        assert patch and model(input_ids=IDS[:1]).logits.dtype == torch.float32


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_whose_logits_are_scaled_scales_them_too(way):
    model = models.model("granite_vision").eval()
    raw = model(input_ids=IDS).logits
    with patches.scale_logits(model):
        assert torch.equal(way(model)(input_ids=IDS).logits, raw / 4)


def test_padding_is_moved_in_16_bits_and_not_where_something_else_counts_columns():
    """A level that all logits share, which a softmax does not see, hides no change; an encoder's mask is no decoder's."""
    model = models.model("gpt2").eval()
    head = torch.nn.Linear(32, models.VOCABULARY)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.fill_(-100.0)
    model.lm_head = head
    assert patches.move_padding_right(model.bfloat16())
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16)
    )
    assert "decoder" in patches.move_padding_right(bart).reason
    counted = models.model("gpt2")
    counted.peft_config = {"default": peft.LoraConfig(alora_invocation_tokens=[3], task_type="CAUSAL_LM")}
    assert "aLoRA" in patches.move_padding_right(counted).reason


def test_a_trainer_holds_its_patch_once():
    """A second call finds it done, and the first one's undo takes it back."""
    trainer = Loops(models.model("llama"))
    mask = torch.tensor([[1, 0]])
    first, second = (patches.mask_padded_log_probs(trainer) for _ in range(2))
    assert first
    assert second.reason == "already applied"
    second.undo()
    assert trainer._forward(mask).tolist() == [[1.0, 0.0]]
    first.undo()
    assert trainer._forward(mask).tolist() == [[1.0, 1.0]]
    assert "_forward" not in vars(trainer)


def test_checkpointing_of_another_trainers_model_is_switched_by_trl(grpo):
    with patches.keep_gradient_checkpointing(grpo):
        assert not checkpointing_is_kept()
        with patches.keep_gradient_checkpointing():
            assert checkpointing_is_kept()
        assert not checkpointing_is_kept()
        assert checkpointing_is_kept(grpo.model)
    assert not checkpointing_is_kept(grpo.model)


def test_a_wrapper_that_came_later_stays():
    trainer = Loops(models.model("llama"))
    patch, calls = patches.mask_padded_log_probs(trainer), []
    ours = trainer._forward
    trainer._forward = lambda mask: calls.append(1) or ours(mask)
    patch.undo()
    assert trainer._forward(torch.tensor([[1, 0]])).tolist() == [[1.0, 1.0]]
    assert calls


def test_a_hook_of_the_policy_alone_has_both_scored_by_their_own_logits(grpo):
    with halved(grpo.model), apply(grpo) as applied:
        assert len(applied["use_model_logits"]) == 2  # whole losses on both sides: one path scores the two


@pytest.mark.parametrize("kind", ["recurrent_gemma", "llama"])
def test_a_copy_of_a_patched_policy_computes_with_its_own_weights(kind):
    """Under `use_model_logits`, and under our kernel, where TRL's own forward without a fused head keeps the original's."""
    grpo = built("GRPOTrainer", models.model(kind), beta=0.04)
    with apply(grpo) as applied:
        whole = bool(applied["use_model_logits"])
        assert whole == (kind == "recurrent_gemma")
        twin = copy.deepcopy(grpo.model)
        before, plain = scores(twin), twin(input_ids=IDS).logits.detach()
        assert torch.equal(before, scores(grpo.model))
        with torch.no_grad():
            for parameter in grpo.model.parameters():
                parameter.mul_(0.5)
        assert torch.equal(scores(twin), before)
        assert torch.equal(twin(input_ids=IDS).logits, plain) or not whole
        assert not torch.equal(scores(grpo.model), before)


def test_an_unpickled_model_is_without_patches():
    """It computes with its own weights, and has no fused head for a patch to be in."""
    grpo = built("GRPOTrainer", beta=0.04)  # a model of its own: hooks that other tests leave are no pickles
    with apply(grpo) as applied:
        assert applied["use_selective_log_probs"]
        twin = pickle.loads(pickle.dumps(grpo.model))
        assert torch.equal(twin(input_ids=IDS).logits, grpo.model(input_ids=IDS).logits)
        assert twin.forward.__func__ is type(twin).forward


def test_a_patched_trainer_resumes_from_its_checkpoint(tmp_path):
    """The second step and the weights of an uninterrupted run."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path), "beta": 0.04}
    whole, resumed = (built("GRPOTrainer", models.model("recurrent_gemma"), **settings) for _ in range(2))
    for trainer, start in ((whole, None), (resumed, str(tmp_path / "checkpoint-1"))):
        with apply(trainer) as applied:
            assert applied["use_model_logits"]
            torch.manual_seed(3407)
            trainer.train(resume_from_checkpoint=start)
    steps = [[entry for entry in trainer.state.log_history if "grad_norm" in entry] for trainer in (whole, resumed)]
    assert steps[0][1]["grad_norm"] == steps[1][1]["grad_norm"] > 0
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("missing", ["training_step", "args", "accelerator", "_forward", "ref_model", None])
def test_a_trainer_that_lacks_something_gets_reasons(missing):
    """AttributeError where a reason belongs."""
    trainer = Loops(models.model("llama"))
    if missing == "training_step":
        trainer = types.SimpleNamespace(**vars(trainer))
    elif missing == "_forward":
        trainer._forward = None
    elif missing is not None:
        delattr(trainer, missing)
    with apply(trainer) as applied:
        said = str(applied)
    assert bool(applied["divide_by_accumulation"]) == (missing not in ("training_step", "accelerator"))
    assert bool(applied["mask_padded_log_probs"]) == (missing not in ("training_step", "_forward"))
    assert said.count("\n") == len(applied.patches) - 1


def test_what_is_no_trainer_is_refused_by_name():
    with pytest.raises(TypeError, match="SimpleNamespace has no model"):
        apply(types.SimpleNamespace())
