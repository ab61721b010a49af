# TRL 1.16: SDFT, SDPO: the teacher, "the initial student", is loaded from the student's path
# A student whose weights are not those of its path (merged, resized or changed) has another teacher.
import torch
from setup_self import saved, sdft
from setup_tiny import tiny

ids = torch.tensor([[2, 3, 7, 8]])


def distance(kind, change):
    student = saved(tiny())
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.1 * torch.randn_like(p)) if change and p.dim() > 1 else None
        before = student(ids).logits
    trainer = sdft(student, teacher_model_kind=kind)
    with torch.no_grad(), trainer._get_teacher_context_for_self_distillation():
        return float((trainer.teacher_model(ids).logits - before).abs().max())


bad = 0
print(
    "| teacher_model_kind | student | largest distance of the teacher's logits to the initial student's |\n|---|---|---|"
)
for kind in ("base", "ema", "live"):
    for change in (False, True):
        far = distance(kind, change)
        bad |= far > 1e-4
        print(f"| {kind} | {'changed since loaded' if change else 'as loaded'} | {far:.5g} |")
raise SystemExit(int(bad))
