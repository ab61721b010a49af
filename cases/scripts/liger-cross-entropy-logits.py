# liger-kernel 0.8.5: with cross_entropy=True (Granite's default) the logits that a float32 model returns beside its loss are gradients
# the kernel writes them over its input, which is the output's own storage: logits.float() and view() copy nothing. In evaluation without
# gradients it still writes zeros over every position whose label is ignored.
import torch
from setup_patched import device, ids, monkey_patch, small
from transformers import GraniteConfig, GraniteForCausalLM

torch.manual_seed(0)
config = GraniteConfig(
    **small,
    num_key_value_heads=2,
)
model = GraniteForCausalLM(config).to(device)
model.lm_head.weight.data.normal_()
labels = ids.masked_fill(ids % 4 == 0, -100)


def measured(logits):
    rows = logits[:, :-1].detach().double()[labels[:, 1:] != -100]
    entropy = -(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1).mean()
    return float(logits.detach().norm()), float(entropy), int((logits == 0).all(-1).sum())


print("| | norm of the returned logits | mean entropy | positions that are all 0 |\n|---|---|---|---|")
found = []
for patched in (False, True):
    if patched:
        monkey_patch.apply_liger_kernel_to_granite(
            rope=False, rms_norm=False, swiglu=False, cross_entropy=True, model=model
        )
    trained = model.train()(input_ids=ids, labels=labels).logits
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids, labels=labels).logits
    for name, logits in (("training", trained), ("evaluation, no_grad", evaluated)):
        found.append(measured(logits))
        print(
            f"| {'patched' if patched else 'unpatched'}, {name} | {found[-1][0]:.5g} | {found[-1][1]:.5g} | {found[-1][2]} |"
        )
raise SystemExit(int(abs(found[2][0] - found[0][0]) > 1e-3))
