"""text-generation-inference. Checked against its commit db931fcf; it is in maintenance and takes nothing new."""

from __future__ import annotations

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.engines import medusa as layouts
from hf_specgen.engines.lookups import refuse_store, unsaid
from hf_specgen.engines.plan import Job, Plan, Takes, refuse_others
from hf_specgen.heads.medusa import MedusaHeads

CHAINS = "TGI drafts the best token of each head, a chain; measured accuracies are not used"


def medusa(heads: MedusaHeads, job: Job) -> Plan:
    """Numbered heads: with an LM head each, or of one block each that use the target's."""
    takes = {
        "hidden_act": ("silu",),
        "lm_head_bias": (False,),
        "draft_vocab_size": (None,),
        "logit_scale": (1.0,),
    }
    refuse_others(job, "Medusa", heads.config, takes)
    whole = layouts.with_biases(heads)
    if not (heads.config.lm_heads == "target" and heads.config.num_layers == 1):
        whole = layouts.with_lm_heads(whole, job, "own")
    config, tensors = layouts.numbered(whole, job)
    depth = job.depth(heads.config.num_heads)
    command = ("text-generation-launcher", "--model-id", str(job.folder), "--speculate", str(depth))
    return Plan(command, {"speculate": depth}, config, tensors, "medusa_lm_head.safetensors", whole, notes=(CHAINS,))


def ngram(lookup: PromptLookup, job: Job) -> Plan:
    """TGI's own n-grams."""
    refuse_store(job, lookup)
    depth = job.depth(2)
    command = ("text-generation-launcher", "--model-id", job.target.name, "--speculate", str(depth))
    return Plan(command, {"speculate": depth}, notes=unsaid(job, lookup))


TAKES: Takes = {"medusa": medusa, "ngram": ngram}
