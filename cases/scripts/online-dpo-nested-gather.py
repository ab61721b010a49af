# TRL below 0.28 with transformers 5.2 or later: OnlineDPOTrainer raises AttributeError at the first logging step
# its _maybe_log_save_evaluate calls Trainer._nested_gather, which transformers 5.2 removed.
from setup_online import online
from setup_tiny import tiny

try:
    online(tiny(), tiny(), logging_strategy="steps", logging_steps=1).train()
    print("three steps of training with logging: done")
except AttributeError as error:
    print("first step of training with logging: AttributeError:", error)
    raise SystemExit(1)
