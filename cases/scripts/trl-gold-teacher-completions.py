# TRL 1.16: seq_kd of GOLDTrainer has no effect: the dataset's completions are trained on, not the teacher's
# It is documented as training on completions that the teacher generates; nothing reads it.
import transformers
from setup_distilled import tokenized, trained
from trl.experimental.gold import GOLDConfig, GOLDTrainer

generate, asked = transformers.GenerationMixin.generate, []


def generating(self, *given, **more):
    asked.append(self)
    return generate(self, *given, **more)


transformers.GenerationMixin.generate = generating
rows = [tokenized([2, 3], [4, 5, 6, 7, 8])] * 2
_, _, tokens = trained(GOLDTrainer, GOLDConfig, rows, 2, 1, lmbda=0.0, seq_kd=True)
print("| calls of generate | tokens of the dataset | trained on |\n|---|---|---|")
print(f"| {len(asked)} | 10 | {tokens} |")
raise SystemExit(int(not asked))
