"""vLLM. Checked against 0.33.0; Medusa against 0.32.0, the last that has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.engines import eagle as layouts
from hf_specgen.engines import medusa as medusa_layouts
from hf_specgen.engines.lookups import refuse_store, unsaid
from hf_specgen.engines.plan import Job, Plan, Takes, refuse_others
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.medusa import MedusaHeads

LAST_WITH_MEDUSA = "needs vLLM 0.32 or earlier: 0.33 no longer has Medusa"
CHAINS = "vLLM drafts the best token of each head, a chain; measured accuracies are not used"


def medusa(heads: MedusaHeads, job: Job) -> Plan:
    """Named heads, one LM head for all where they share one or use the target's."""
    takes = {"hidden_act": ("silu",), "lm_head_bias": (False,)}
    refuse_others(job, "Medusa", heads.config, takes)
    if heads.config.num_layers < 1:
        raise ValueError("vLLM cannot run Medusa heads without blocks (num_layers=0)")
    if heads.config.draft_vocab_size is not None and heads.config.lm_heads != "shared":
        raise ValueError("vLLM takes a token_map with one LM head for all, and these heads have one each")
    whole = medusa_layouts.with_lm_heads(heads, job, "own" if heads.config.lm_heads == "own" else "shared")
    config, tensors = medusa_layouts.named(whole, job)
    plan = _served(job, {"method": "medusa"}, heads.config.num_heads, (LAST_WITH_MEDUSA, CHAINS))
    return replace(plan, config=config, tensors=tensors, head=whole)


def eagle(head: EagleHead, job: Job) -> Plan:
    """EAGLE-1 and 2."""
    refuse_others(job, "EAGLE head", head.config, {**layouts.FIRST, "fc_bias": (False,)})
    biases = {"attention_bias": head.config.o_bias, "qkv_bias": head.config.qkv_bias}
    config = {**layouts.first(head, "LlamaForCausalLM"), **biases}
    return replace(_served(job, {"method": "eagle"}, 3), config=config, tensors=layouts.tensors_of(head), head=head)


def eagle3(head: EagleHead, job: Job) -> Plan:
    """EAGLE-3, with norms of queries and keys as a Qwen3 layer."""
    refuse_others(job, "EAGLE-3 head", head.config, attention_takes(head))
    architecture = "Eagle3Qwen3ForCausalLM" if head.config.qk_norm else "LlamaForCausalLMEagle3"
    config = layouts.third(head, architecture, layouts.layers_of(head, job))
    return replace(_served(job, {"method": "eagle3"}, 3), config=config, tensors=layouts.tensors_of(head), head=head)


def attention_takes(head: EagleHead) -> Mapping[str, tuple[Any, ...]]:
    """What of the settings of EAGLE-3 a Llama or Qwen3 layer of vLLM and speculators has."""
    if head.config.qk_norm:
        return {**layouts.THIRD, "qkv_bias": (False,), "o_bias": (False,), "mlp_bias": (False,)}
    return {**layouts.THIRD, "qkv_bias": (head.config.o_bias,)}


def draft_model(model: PreTrainedModel, job: Job) -> Plan:
    """A whole causal LM with the target's vocabulary."""
    return replace(_served(job, {"method": "draft_model"}, 5), head=model)


def ngram(lookup: PromptLookup, job: Job) -> Plan:
    """Prompt lookup."""
    refuse_store(job, lookup)
    words = {"prompt_lookup_min": lookup.min_ngram, "prompt_lookup_max": lookup.max_ngram}
    return _served(job, {"method": "ngram", **words}, 5, unsaid(job, lookup, ("min_ngram", "max_ngram")))


def suffix(lookup: SuffixLookup, job: Job) -> Plan:
    """Suffix decoding; needs the package arctic-inference."""
    refuse_store(job, lookup)
    words: dict[str, Any] = {
        # Nothing is kept of one request for another, as here.
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_min_token_prob": lookup.min_token_prob,
    }
    if lookup.max_spec_factor is not None:
        words["suffix_decoding_max_spec_factor"] = lookup.max_spec_factor
    notes = ("needs the package arctic-inference", *unsaid(job, lookup, ("min_token_prob", "max_spec_factor")))
    words["suffix_decoding_max_tree_depth"] = job.depth(24)
    return _served(job, {"method": "suffix", **words}, 24, notes)


def _served(job: Job, words: Mapping[str, Any], usual: int, notes: tuple[str, ...] = ()) -> Plan:
    model = {} if words["method"] in ("ngram", "suffix") else {"model": str(job.folder)}
    speculative = {**words, **model, "num_speculative_tokens": job.depth(usual)}
    command = ("vllm", "serve", job.target.name, "--speculative-config", json.dumps(speculative))
    return Plan(command, speculative, notes=notes)


TAKES: Takes = {
    "medusa": medusa,
    "eagle": eagle,
    "eagle3": eagle3,
    "draft_model": draft_model,
    "ngram": ngram,
    "suffix": suffix,
}
