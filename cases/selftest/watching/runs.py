"""Real TRL trainers on tiny models, with samplers whose log-probs are right, or wrong in a known way."""

import functools
import json
from types import SimpleNamespace
from unittest import mock

import torch

import parity
from cases.selftest.slow import number
from parity import recording
from parity.rollouts import engine_models
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.stored_window import Sample
from parity.trainers.specs import SPECS
from parity.upstream import trl

SEED = number("SEED", 3407)
"""Of what is generated and of the order of the data."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sampler(
    prompts, trainer, change=lambda logps: logps, temperature=None, raw=False, model=None, cut=0, begins=(), **support
):
    """A `rollout_func`: the trainer's own model generates, and hands out log-probs as an engine does.

    `cut`: it sees so many last tokens of a prompt alone; `begins`: tokens that it puts before each; `support`: top_p, top_k or
    min_p.
    """
    policy = model or trainer.model
    modes, found = policy.training, {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    policy.eval()
    for prompt in prompts:
        ids = trainer.processing_class(prompt, return_tensors="pt")["input_ids"].to(policy.device)
        given = torch.cat([ids.new_tensor([begins]), ids[:, -cut:]], 1) if begins else ids[:, -cut:]
        with torch.no_grad():
            out = policy.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                temperature=temperature or trainer.temperature,
                **{"top_p": 1.0, "top_k": 0, **support},
                max_new_tokens=trainer.max_completion_length,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
        tokens = out.sequences[0, given.shape[1] :]
        rows = torch.stack([z[0].float() for z in (out.logits if raw else out.scores)]).log_softmax(-1)
        found["prompt_ids"].append(ids[0].tolist())
        found["completion_ids"].append(tokens.tolist())
        found["logprobs"].append(change(rows.gather(1, tokens[:, None])[:, 0].cpu()).tolist())
    policy.train(modes)
    return found


def recorded(name, prompts, trainer):
    """A `rollout_func`: the rollouts that vLLM made of a shipped model."""
    r = recording.named(name)
    rows, count = r.rows()[: len(prompts)], len(prompts)
    lengths = r.completion_lengths[:count].tolist()
    logps = [values[:n].tolist() for values, n in zip(r.sampler_logps[:count], lengths, strict=True)]
    return {"prompt_ids": [p for p, _ in rows], "completion_ids": [c for _, c in rows], "logprobs": logps}


def grpo(rollout=None, model="llama", dtype=torch.float32, policy=None, peft=None, **wanted):
    """A GRPOTrainer of two steps."""
    settings = {"seed": SEED, "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "beta": 0.0}
    settings |= {"gradient_checkpointing": False, **wanted}
    more = {} if rollout is None else {"rollout_func": rollout}
    prompts = [Sample(f"{models.words(7, f'prompt {i}', 2 + 3 * (i % 3))} ", "", "", label=True) for i in range(8)]
    more["train_dataset"] = stored_window.dataset(prompts, "prompts")
    policy = models.model(model, dtype) if policy is None else policy
    return drive.build("GRPOTrainer", policy, settings, DEVICE, peft, **more)


def corrected(rollout, **wanted):
    """The same, importance ratios to the sampler applied as with vLLM."""
    trainer = grpo(rollout, vllm_importance_sampling_mode="token_truncate", **wanted)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def vllm(name, **wanted):
    """A GRPOTrainer of one step on the model of a recording, whose rollouts it gets."""
    facts = recording.named(name).facts
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[facts["dtype"]]
    policy = engine_models.loaded(engine_models.folder_of(facts["model"]), dtype)
    settings = {"max_steps": 1, "max_completion_length": 32, "learning_rate": 0.0, **wanted}
    return grpo(functools.partial(recorded, name), policy=policy, **settings)


def within(trainer, method, of=None, **changed):
    """The trainer, one method of which runs while attributes of it, or of another object, are others."""
    original = getattr(trainer, method)

    def run(*args, **kwargs):
        with mock.patch.multiple(trainer if of is None else of, **changed):
            return original(*args, **kwargs)

    setattr(trainer, method, run)
    return trainer


def scored(trainer, model, inputs):
    """Log-probs of a batch's completions as the trainer scores them."""
    parts = ("prompt", "completion")
    ids, mask = (torch.cat([inputs[f"{part}_{what}"] for part in parts], 1) for what in ("ids", "mask"))
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]


def watched(trainer, tmp_path, **options):
    """The watch of a whole run, and the lines that it wrote."""
    to = tmp_path / "watch.ndjson"
    watch = parity.watch(trainer, to=to, **{"every": 1, **options})
    with trl.quiet():
        trainer.train()
    return watch, [json.loads(line) for line in to.read_text().splitlines()] if to.exists() else []


def of(trainer, peft=None, model="llama", dtype=torch.float32, data=None, **wanted):
    """A trainer of TRL by its name here, of a model or the name of one, two steps on stored completions or its own."""
    spec = SPECS[trainer]
    more = {"teacher_model": models.model("llama")} if spec.given == "teacher_model" else {}
    more |= {} if data is None else {"train_dataset": data}
    settings = {"seed": SEED, "max_steps": 2, "max_length": 256, "gradient_checkpointing": False, **wanted}
    model = models.model(model, dtype) if isinstance(model, str) else model
    return drive.build(spec.upstream, model, settings, DEVICE, peft, **more)
