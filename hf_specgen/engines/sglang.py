"""SGLang. Checked against 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.engines import eagle as layouts
from hf_specgen.engines.lookups import refuse_store, unsaid
from hf_specgen.engines.plan import Job, Plan, Takes, refuse_others
from hf_specgen.heads.eagle import EagleHead

UNBIASED = {**layouts.UNBIASED, "mlp_bias": (False,)}


def eagle(head: EagleHead, job: Job) -> Plan:
    """EAGLE-1 and 2; `fc` gets a bias of zeros, since SGLang's has one in any case."""
    refuse_others(job, "EAGLE head", head.config, {**layouts.FIRST, **UNBIASED, "own_embeddings": (False,)})
    whole = layouts.with_fc_bias(head)
    config = layouts.first(whole, "LlamaForCausalLMEagle")
    return replace(_served(job, "EAGLE", 3), config=config, tensors=layouts.tensors_of(whole), head=whole)


def eagle3(head: EagleHead, job: Job) -> Plan:
    """EAGLE-3, of several layers too: the norm of a later layer's input is called `hidden_norm`."""
    takes = {**layouts.THIRD, **UNBIASED, "norm_before_residual": (False,), "use_fc": (True,)}
    refuse_others(job, "EAGLE-3 head", head.config, takes)
    layouts.refuse_own_embeddings(job, head.config)
    layouts.refuse_one_state(job, head.config)
    layers = layouts.layers_of(head, job)
    layouts.refuse_embeddings(job, layers)
    config = layouts.third(head, "LlamaForCausalLMEagle3", layers)
    tensors = layouts.later_norms_hidden(layouts.tensors_of(head))
    return replace(_served(job, "EAGLE3", 3), config=config, tensors=tensors, head=head)


def draft_model(model: PreTrainedModel, job: Job) -> Plan:
    """A whole causal LM with the target's vocabulary."""
    return replace(_served(job, "STANDALONE", 5), head=model)


def ngram(lookup: PromptLookup, job: Job) -> Plan:
    """SGLang's own n-grams, in trees, out of the texts that it has seen."""
    refuse_store(job, lookup)
    speculative = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": job.depth(12)}
    notes = ("SGLang's n-grams are looked up in what all requests have said", *unsaid(job, lookup))
    return Plan(_command(job, speculative), speculative, notes=notes)


def _served(job: Job, algorithm: str, usual: int) -> Plan:
    steps = job.depth(usual)
    speculative = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(job.folder),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        # The root counts.
        "speculative_num_draft_tokens": steps + 1,
    }
    return Plan(_command(job, speculative), speculative)


def _command(job: Job, speculative: Mapping[str, Any]) -> tuple[str, ...]:
    flags = [word for name, value in speculative.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ("python", "-m", "sglang.launch_server", "--model-path", job.target.name, *flags)


TAKES: Takes = {"eagle": eagle, "eagle3": eagle3, "draft_model": draft_model, "ngram": ngram}
