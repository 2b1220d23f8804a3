"""LMDeploy's PyTorch backend. Checked against 0.16.0, commit 1263d5cd; its EAGLE heads draft for Llama targets."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_specgen.engines import eagle as layouts
from hf_specgen.engines.plan import Job, Plan, Takes, refuse_others
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.recorded import TargetRecord

ARCHITECTURE = "LlamaForCausalLM"


def eagle(head: EagleHead, job: Job) -> Plan:
    """EAGLE-1 and 2; a head that uses the target's embeddings gets a copy of them."""
    _refuse_target(job)
    refuse_others(job, "EAGLE head", head.config, {**layouts.FIRST, **layouts.UNBIASED, "fc_bias": (False,)})
    whole = layouts.with_embeddings(head, job)
    config = layouts.first(whole, ARCHITECTURE)
    return replace(_served(job, "eagle"), config=config, tensors=layouts.tensors_of(whole), head=whole)


def eagle3(head: EagleHead, job: Job) -> Plan:
    """EAGLE-3 of one layer over the original's layers; a head that uses the target's LM head gets a copy of it."""
    _refuse_target(job)
    takes = {
        **layouts.THIRD,
        **layouts.UNBIASED,
        **dict.fromkeys(("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"), (False,)),
        "num_hidden_layers": (1,),
        "use_fc": (True,),
    }
    refuse_others(job, "EAGLE-3 head", head.config, takes)
    _refuse_layers(head, job)
    layouts.refuse_one_state(job, head.config)
    whole = layouts.with_lm_head(head, job)
    tensors = layouts.midlayer(layouts.tensors_of(whole))
    # Without a map all of its ids would become 0.
    tensors.setdefault("d2t", torch.zeros(int(whole.config.draft_vocab_size or 0), dtype=torch.long))
    config = layouts.third(whole, ARCHITECTURE, layouts.layers_of(whole, job))
    return replace(_served(job, "eagle3"), config=config, tensors=tensors, head=whole)


def _refuse_target(job: Job) -> None:
    if job.target.architectures and ARCHITECTURE not in job.target.architectures:
        raise ValueError(
            f"lmdeploy has EAGLE for {ARCHITECTURE} targets, and {job.target.name} is "
            f"{', '.join(job.target.architectures)}"
        )


def _refuse_layers(head: EagleHead, job: Job) -> None:
    """Refuses other layers than the original's, which no field of LMDeploy's can name."""
    layers = layouts.layers_of(head, job)
    if layers is None:
        return
    count = job.target.num_layers or TargetRecord.from_dict(head.config.target or {}).num_layers
    if count is None:
        raise ValueError(
            f"lmdeploy reads layers 2, L // 2 and L - 3 of a target of L, which are to be feature_layers={layers}: "
            "pass target=, which says L"
        )
    if layers != [2, count // 2, count - 3]:
        raise ValueError(
            f"lmdeploy reads the target's hidden_states {[2, count // 2, count - 3]} and no others, and this head "
            f"reads {layers}"
        )


def _served(job: Job, algorithm: str) -> Plan:
    speculative = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model": str(job.folder),
        "speculative_num_draft_tokens": job.depth(3),
    }
    flags = [word for name, value in speculative.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ("lmdeploy", "serve", "api_server", job.target.name, "--backend", "pytorch", *flags)
    return Plan(command, speculative)


TAKES: Takes = {"eagle": eagle, "eagle3": eagle3}
