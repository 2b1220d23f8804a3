"""TensorRT-LLM's PyTorch backend. Checked against its main branch in 2026, commits 00679c66 and 00043967."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.engines import eagle as layouts
from hf_specgen.engines.lookups import refuse_store, unsaid
from hf_specgen.engines.plan import Job, Plan, Takes, refuse_others
from hf_specgen.heads.eagle import EagleHead

FILE = "trtllm.yaml"


def eagle3(head: EagleHead, job: Job) -> Plan:
    """EAGLE-3, of several layers too: the norm of a later layer's input is called `hidden_norm`."""
    takes = {**layouts.THIRD, **layouts.UNBIASED, "norm_before_residual": (False,), "use_fc": (True,)}
    if head.config.fc_norm:
        takes["norm_before_fc"] = (False,)
    refuse_others(job, "EAGLE-3 head", head.config, takes)
    layouts.refuse_own_embeddings(job, head.config)
    layouts.refuse_one_state(job, head.config)
    if head.config.sources == 1:
        raise ValueError("trtllm makes no fc for a head that reads one of the target's states, and this head has one")
    layers = layouts.layers_of(head, job)
    layouts.refuse_embeddings(job, layers)
    # Here too a layer is named by its output.
    captured = {} if layers is None else {"eagle3_layers_to_capture": [layer - 1 for layer in layers]}
    config = layouts.third(head, "LlamaForCausalLMEagle3", layers)
    tensors = layouts.later_norms_hidden(layouts.tensors_of(head))
    return replace(_drafting(job, "Eagle3", 3, captured), config=config, tensors=tensors, head=head)


def draft_model(model: PreTrainedModel, job: Job) -> Plan:
    """A whole causal LM with the target's vocabulary."""
    return replace(_drafting(job, "Draft_Target", 5, {}), head=model)


def ngram(lookup: PromptLookup, job: Job) -> Plan:
    """Prompt lookup, each request in its own text and the latest place first, as here."""
    refuse_store(job, lookup)
    words = {"max_matching_ngram_size": lookup.max_ngram, "is_public_pool": False, "is_use_oldest": False}
    return _served(
        job, {"decoding_type": "NGram", "max_draft_len": job.depth(5), **words}, unsaid(job, lookup, ("max_ngram",))
    )


def suffix(lookup: SuffixLookup, job: Job) -> Plan:
    """The suffix automaton."""
    refuse_store(job, lookup)
    return _served(job, {"decoding_type": "SA", "max_draft_len": job.depth(8)}, unsaid(job, lookup))


def _drafting(job: Job, kind: str, usual: int, words: Mapping[str, Any]) -> Plan:
    named = {"decoding_type": kind, "max_draft_len": job.depth(usual), "speculative_model": str(job.folder)}
    return _served(job, {**named, **words}, ())


def _served(job: Job, speculative: Mapping[str, Any], notes: tuple[str, ...]) -> Plan:
    # JSON's scalars and lists are YAML.
    lines = [f"  {name}: {json.dumps(value)}" for name, value in speculative.items()]
    text = "\n".join(["speculative_config:", *lines, ""])
    command = ("trtllm-serve", job.target.name, "--config", str(job.folder / FILE))
    return Plan(command, speculative, texts={FILE: text}, notes=notes)


TAKES: Takes = {"eagle3": eagle3, "draft_model": draft_model, "ngram": ngram, "suffix": suffix}
