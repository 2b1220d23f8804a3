"""What other engines load: one file each, with the kinds of drafter that it takes and how they are written for it."""

from __future__ import annotations

from collections.abc import Mapping

from hf_specgen.engines import lmdeploy, sglang, speculators, tgi, trtllm, vllm
from hf_specgen.engines.plan import Takes

ENGINES: Mapping[str, Takes] = {
    "vllm": vllm.TAKES,
    "speculators": speculators.TAKES,
    "sglang": sglang.TAKES,
    "tgi": tgi.TAKES,
    "trtllm": trtllm.TAKES,
    "lmdeploy": lmdeploy.TAKES,
}
