# peft 0.21.2: LoRA with `layer_replication`: merging adds the adapters of all copies of a layer to the one weight that they share, and a second adapter replicates the layers once more
# peft/tuners/lora/model.py:LoraModel._prepare_model calls replicate_layers for each adapter, and Linear.merge writes to base_layer.weight.data, which replicate_layers shares; "the new layers will all have separate LoRA adapters"
import warnings

import peft
import torch
import transformers
from setup_tiny import tiny

IDS = torch.arange(2, 20)[None]
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def adapted(replication):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], layer_replication=replication)
    model = peft.get_peft_model(tiny().eval(), config)
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    return model.eval(), config


print(
    "| layer_replication | changed by merging | by a second adapter, the first one active | layers, then |\n|---|---|---|---|"
)
wrong = False
for replication in (None, [[0, 1], [1, 2]], [[0, 2], [0, 2]]):
    model, config = adapted(replication)
    before, layers = logits(model), model.config.num_hidden_layers
    model.add_adapter("second", config)
    second = float((logits(model) - before).abs().max())
    now = len(model.base_model.model.model.layers)
    merged = float((logits(adapted(replication)[0].merge_and_unload()) - before).abs().max())
    print(f"| {replication} | {merged:.2g} | {second:.2g} | {layers}, {now} |")
    wrong |= max(merged, second) > 1e-3
raise SystemExit(int(wrong))
