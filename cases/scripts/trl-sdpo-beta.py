# TRL 1.16: SDPOConfig's beta, "KL coefficient", has no effect
# It is stored and read nowhere: three steps with 0 and with 10.
from setup_processes import Keep
from setup_self import saved, sdpo
from setup_tiny import tiny


def rewarded(prompts, completion_ids, **_):
    return [float(len(set(ids))) + i for i, ids in enumerate(completion_ids)]


def norms(beta, **more):
    trainer = sdpo(saved(tiny()), rewarded, beta=beta, distillation_weight=0.0, max_steps=4, learning_rate=1e-2, **more)
    keep = Keep()
    trainer.add_callback(keep)
    trainer.train()
    return keep.norms


zero, ten = norms(0.0), norms(10.0)
print("| step | gradient norm, beta 0 | beta 10 |\n|---|---|---|")
for step, (a, b) in enumerate(zip(zero, ten)):
    print(f"| {step + 1} | {a:.6g} | {b:.6g} |")
raise SystemExit(int(zero == ten))
