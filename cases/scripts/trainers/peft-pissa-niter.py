# peft 0.21.2: init_lora_weights="pissa_niter_N": an adapter that is saved and loaded is another model: the base weights without their principal part are made anew, by a random algorithm
# peft/tuners/lora/layer.py:LoraLayer.pissa_init calls torch.svd_lowrank where the adapter is loaded too, and subtracts what it finds; with "pissa", an exact SVD, it finds the same
import tempfile
import warnings

import peft
import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
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
    config = peft.LoraConfig(r=8, init_lora_weights=kind, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), config)
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
for kind in (True, "pissa", "pissa_niter_4", "pissa_niter_16"):
    changed, off, apart = run(kind)
    print(f"| {kind} | {changed:.3f} | {off:.2g} | {apart:.2g} |")
    wrong |= off > 1e-3
raise SystemExit(int(wrong))
