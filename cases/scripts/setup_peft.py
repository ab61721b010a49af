import warnings

import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
IDS = torch.arange(2, 30)[None]


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits
