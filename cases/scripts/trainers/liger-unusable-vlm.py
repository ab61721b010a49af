# liger-kernel 0.8.5 with transformers 5.23.0: six documented patches are an ImportError: the output classes that they extend are gone
from liger_kernel.transformers import monkey_patch

bad = []
print("| patch | error |\n|---|---|")
for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe"):
    try:
        monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[name]()
    except ImportError as error:
        bad.append(name)
        print(f"| {name} | {str(error)[:70]} |")
raise SystemExit(int(bool(bad)))
