"""The library speculators, whose checkpoints vLLM serves as they are. Checked against 0.9.0."""

from __future__ import annotations

from typing import Any

from hf_specgen.engines import eagle as layouts
from hf_specgen.engines.plan import Job, Plan, Takes, dtype_of, refuse_others
from hf_specgen.engines.vllm import attention_takes
from hf_specgen.heads.eagle import EagleHead

VERSION = "0.9.0"


def eagle3(head: EagleHead, job: Job) -> Plan:
    """EAGLE-3; a head that uses the target's embeddings or LM head gets a copy of them."""
    takes = {**attention_takes(head), "use_fc": (True,), "target_hidden_size": (head.config.hidden_size,)}
    if head.config.fc_norm:
        takes["norm_before_fc"] = (False,)
    refuse_others(job, "EAGLE-3 head", head.config, takes)
    # The library takes the target's for those that are missing only if their memory happens to hold a NaN.
    layers, whole = layouts.layers_of(head, job), layouts.with_embeddings(layouts.with_lm_head(head, job), job)
    depth = job.depth(3)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    tensors = layouts.tensors_of(whole)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": job.target.name, "architectures": job.target.architectures},
        },
        "transformer_layer_config": layouts.network(whole),
        "draft_vocab_size": whole.config.draft_vocab_size,
        "target_hidden_size": whole.config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": whole.config.norm_before_residual,
        "norm_before_fc": whole.config.norm_before_fc,
        "fc_norm": whole.config.fc_norm,
        "norm_output": whole.config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(tensors),
    }
    served = {"method": "eagle3", "model": str(job.folder), "num_speculative_tokens": depth}
    return Plan(("vllm", "serve", str(job.folder)), served, config, tensors, head=whole)


TAKES: Takes = {"eagle3": eagle3}
