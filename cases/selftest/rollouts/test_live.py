"""A real vLLM, a process a run: where it is installed (make rollouts-live)."""

import json
import shutil
import subprocess
import sys

import pytest

from parity.rollouts import engine_models
from parity.rollouts.contract import LINES
from parity.rollouts.vllm_engine import distribution

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(distribution() is None, reason="vLLM is not installed: make rollouts-live"),
    pytest.mark.timeout(1500),
]


def rollouts(*words):
    done = subprocess.run([sys.executable, "-m", "parity", "rollouts", *words], capture_output=True, text=True)
    print("\n" + done.stdout)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, done.stdout


def test_a_softcap_that_the_engine_lost(tmp_path):
    model = shutil.copytree(engine_models.folder_of("tiny-gemma2"), tmp_path / "uncapped")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": None}))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(json.dumps([3 + (7 * i + j) % 50 for j in range(5)]) for i in range(32)))
    words = ["--model", str(model), "--temperature", "0.7", "--prompts", str(prompts), "--rows", "32"]
    assert rollouts("record", "--engine", "vllm", *words, "--max-tokens", "16", "--out", str(tmp_path))[0] == 0
    code, out = rollouts("judge", str(tmp_path / "uncapped-fp32-t0.7-p1"), "--model", "tiny-gemma2")
    assert code == 1 and "what fits better: the softcap 3 of the logits is left out" in out


def test_every_line_of_the_contract_holds(tmp_path):
    asked = ["--temperature", "1", "--temperature", "0.7", "--top-p", "1", "--top-p", "0.8", "--contract"]
    words = ["--model", "tiny-llama", "--engine", "vllm", *asked, "--rows", "12", "--max-tokens", "16"]
    assert rollouts("record", *words, "--out", str(tmp_path))[0] == 0
    code, out = rollouts("judge", *map(str, sorted(tmp_path.glob("*.json"))))
    lines = [line for line in out.splitlines() if line.split(",")[0] in LINES]
    assert code == 0 and len(lines) == len(LINES)
    assert [line.split(",")[0] for line in lines if ": holds (" not in line] == ["push"]


def sparse(folder):
    """A model whose experts TRL 1.16 pushes under names that vLLM 0.32 passes over."""
    import transformers

    size = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    size |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1}
    config = transformers.Lfm2MoeConfig(**size, initializer_range=0.15, max_position_embeddings=256)
    transformers.Lfm2MoeForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(engine_models.folder_of("tiny-llama")).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma2", "sparse"])
def test_a_push_by_trl(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[3, 4, 5, 6]\n[9, 8, 7]")
    words = ["--engine", "vllm", "--push", str(tmp_path / "moved"), "--prompts", str(prompts), "--rows", "8"]
    named = sparse(tmp_path / "made") if model == "sparse" else model
    assert rollouts("record", "--model", named, *words, "--out", str(tmp_path))[0] == 0
    code, out = rollouts("judge", str(tmp_path / "moved-fp32-t1-p1"))
    (said,) = (line for line in out.splitlines() if line.startswith("push, "))
    if model == "sparse":
        assert code == 1 and "2 of vLLM's" in said and "experts.w13_weight" in said and "experts.w2_weight" in said
    else:
        assert code == 0 and said.endswith(": holds (1 recordings)")


WARM = "temperature 1 (raw log-probs: none is applied) where the trainer's is 0.7"


@pytest.mark.parametrize(
    "run, found",
    [("clean", []), ("stale", [["sampler", "weights 1 update old"]]), ("warm", [["sampler", WARM]] * 3)],
)
def test_a_watched_colocated_run_is_silent_until_it_is_wrong(tmp_path, run, found):
    command = [sys.executable, "-m", "cases.selftest.watching.live", run, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    said = json.loads(line.removeprefix("FOUND "))
    assert said["looks"] == 3 and said["found"][: len(found) or None] == found
