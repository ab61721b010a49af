# transformers 5.23.0: Aya Vision, Command A Vision, Granite Vision (LLaVA-NeXT), Granite Speech leave out the scale of their text model's logits; TRL 1.16.0's loss has it, so that GRPO draws from another distribution than it trains
# transformers/models/aya_vision/modeling_aya_vision.py and others: logits = self.lm_head(hidden_states), where 4.51 called Cohere2ForCausalLM. Beside the text model alone with the same weights; Gemma 3 is right
import datasets
import torch
import transformers
from setup_tiny import options, tokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

transformers.utils.logging.set_verbosity(50)
datasets.disable_progress_bars()
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
IDS = dict(vocab_size=32, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=2)
SIGHT = dict(SIZE, image_size=8, patch_size=4, model_type="siglip_vision_model")
COHERE, GRANITE = dict(model_type="cohere2"), dict(model_type="granite", logits_scaling=8.0)
HEARING = dict(input_dim=8, num_layers=2, hidden_dim=16, feedforward_mult=2, num_heads=2, dim_head=8, output_dim=8)
QUERIES = dict(SIZE, model_type="blip_2_qformer", encoder_hidden_size=16)
EYES = dict(vision_config=SIGHT)
EARS = dict(
    encoder_config=HEARING | dict(context_size=8, max_pos_emb=8), projector_config=QUERIES, has_lora_adapter=False
)
MODELS = {
    "Gemma 3": ("Gemma3", dict(head_dim=8, query_pre_attn_scalar=8), EYES),
    "Aya Vision": ("AyaVision", COHERE, EYES),
    "Command A Vision": ("Cohere2Vision", COHERE, EYES),
    "Granite Vision": ("LlavaNext", GRANITE, EYES),
    "Granite Speech": ("GraniteSpeech", GRANITE, EARS),
}
ROWS = [" ".join(f"w{2 + (7 * i + 3 * j) % 30}" for j in range(4)) for i in range(4)]


def made(family, text, more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(text_config=SIZE | IDS | text, **more)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def of_text(model):
    """The text model alone, with the same weights."""
    config = model.config.get_text_config()
    alone = transformers.AutoModelForCausalLM.from_config(config).eval()
    alone.model.load_state_dict(model.model.language_model.state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    return alone


def quiet(trainer):
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]


def nll(model):
    ids = [torch.tensor([tokenizer(row)["input_ids"] + [1]]) for row in ROWS]
    with torch.no_grad():
        terms = [-model(row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0] for row in ids]
    return float(torch.cat(terms).mean())


def sft(model):
    more = dict(per_device_train_batch_size=4, max_steps=1, logging_strategy="steps", logging_steps=1)
    args = SFTConfig(**options(**more, gradient_checkpointing=False))
    data = datasets.Dataset.from_list([{"text": row} for row in ROWS])
    return quiet(SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer))["loss"]


def rewarded(completions, **_):
    return [float(i) for i in range(len(completions))]


def drawn(model):
    """How far the log-probs that completions are drawn from are from those that are trained."""
    more = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=1, max_steps=1)
    args = GRPOConfig(**options(**more, gradient_checkpointing=False, logging_strategy="steps", logging_steps=1))
    data = datasets.Dataset.from_list([{"prompt": row} for row in ROWS])
    trainer = GRPOTrainer(model, rewarded, args=args, train_dataset=data, processing_class=tokenizer)
    made, computed, seen = model.generate, trainer._get_per_token_logps_and_entropies, {}

    def generate(*given, **more):
        out = made(*given, **more, output_logits=True, return_dict_in_generate=True)
        seen["drawn"] = out.logits[0].log_softmax(-1).gather(-1, out.sequences[:, -1:])
        seen["token"] = out.sequences[:, -1]
        return out.sequences

    def watched(policy, ids, *given, **more):
        out = computed(policy, ids, *given, **more)
        order = [int((seen["token"] == token).nonzero()[0]) for token in ids[:, -1]]
        seen["off"] = float((out[0].detach() - seen["drawn"][order]).abs().max())
        return out

    model.generate, trainer._get_per_token_logps_and_entropies = generate, watched
    quiet(trainer)
    return seen["off"]


bad = False
print(
    "| model | its logits by its text model's | loss of both | SFT | GRPO, log-probs drawn from and trained differ by |"
)
print("|---|---|---|---|---|")
for name, given in MODELS.items():
    model = made(*given)
    alone, ids = of_text(model), torch.arange(3, 13)[None]
    with torch.no_grad():
        ratio = float(model(ids).logits.norm() / alone(ids).logits.norm())
    bad |= abs(ratio - 1) > 1e-3
    losses = f"{nll(model):.3g}, {nll(alone):.3g} | {sft(made(*given)):.3g} | {drawn(made(*given)):.2g}"
    print(f"| {name} | {ratio:.3g} | {losses} |")
raise SystemExit(int(bad))
