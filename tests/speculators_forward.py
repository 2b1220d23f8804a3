"""Run by the library speculators' own python: loads exported folders with its own classes and keeps what they say.

`python speculators_forward.py INPUTS OUTPUTS FOLDER...`: INPUTS holds `input_ids` (1, length) and for each folder its
states (1, length, sources * hidden); OUTPUTS gets each folder's logits and drafted tokens, step by step.
"""

import sys
from pathlib import Path

import torch
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig

STEPS = 3


def main(inputs: str, outputs: str, *folders: str) -> None:
    held, said = torch.load(inputs), {}
    for folder in folders:
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(folder, config=config).eval()
        if unset := [name for name, tensor in model.named_parameters() if tensor.isnan().any()]:
            raise SystemExit(f"{folder}: {unset} were not loaded")
        logits = []
        model.lm_head.register_forward_hook(lambda module, args, output, kept=logits: kept.append(output))
        ids = held["input_ids"]
        with torch.no_grad():
            drafted = model(held[Path(folder).name], input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=STEPS)
        said[Path(folder).name] = {
            "class": type(model).__name__,
            "layers": list(model.target_layer_ids),
            "logits": torch.stack(logits),
            "drafted": torch.stack(drafted),
            "d2t": model.d2t,
        }
    torch.save(said, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
