"""Speculative decoding as a recipe that transformers loads by itself; the model is not changed.

model.generate(**inputs, custom_generate="<this repository>", trust_remote_code=True, assistant=drafter)
"""

from functools import partial
from typing import Any

from transformers import PreTrainedModel

import hf_specgen as sg


def generate(model: PreTrainedModel, assistant: Any = None, **kwargs: Any) -> Any:
    """Stock `generate`, decoded by hf_specgen's loop.

    Args:
        model: the target, as transformers passes it.
        assistant: what drafts; see `hf_specgen.SpecGenMixin.generate`.
        **kwargs: whatever stock `generate` was called with, and the options that go with `assistant=`.

    Returns:
        What stock returns; with `return_dict_in_generate=True` an `hf_specgen.SpeculativeOutput`.
    """
    # transformers keeps these from every callable, unless they are bound to it.
    kept = {name: kwargs.pop(name, None) for name in ("streamer", "tokenizer", "assistant_tokenizer")}
    return model.generate(**kwargs, custom_generate=partial(sg.speculate, **kept), assistant=assistant)
