# peft 0.21.2: init_lora_weights="pissa_niter_N" or "lora_ga": an adapter that is saved and loaded is another model: what the initialisation took from the base weights is made anew by a random algorithm (PiSSA), or not at all (LoRA-GA)
# peft/tuners/lora/layer.py:LoraLayer.pissa_init calls torch.svd_lowrank where the adapter is loaded too, and subtracts what it finds; lora_ga_init has no gradients there and subtracts nothing
import tempfile
import warnings

import peft
import torch
import transformers
from peft.tuners.lora.loraga import preprocess_loraga

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(2, 34)[None]
SIZE = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)


def base(seed=0):
    """The same model, and another state of torch's generator."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).eval()
    torch.manual_seed(seed)
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def run(kind):
    """Trained for some steps: what that changed in the logits, and by how much those of the loaded adapter are off; loaded twice, from each other."""
    model = base()
    given = dict(r=8, init_lora_weights=kind, target_modules=NAMES, task_type="CAUSAL_LM")
    if kind == "lora_ga":
        config = peft.LoraConfig(**given, lora_ga_config=peft.LoraGAConfig())
        preprocess_loraga(model, config, lambda: model(input_ids=IDS, labels=IDS).loss.backward())
    else:
        config = peft.LoraConfig(**given)
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    right, folder = logits(model), tempfile.mkdtemp()
    model.save_pretrained(folder)
    one, two = (logits(peft.PeftModel.from_pretrained(base(seed), folder)) for seed in (1, 2))
    return (float((a - b).abs().max()) for a, b in ((right, logits(base())), (one, right), (one, two)))


print(
    "| init_lora_weights | training changed the logits by | loaded: off by | loaded twice: apart by |\n|---|---|---|---|"
)
wrong = False
for kind in (True, "pissa", "pissa_niter_4", "pissa_niter_16", "lora_ga"):
    changed, off, apart = run(kind)
    print(f"| {kind} | {changed:.3f} | {off:.2g} | {apart:.2g} |")
    wrong |= off > 1e-3
raise SystemExit(int(wrong))
