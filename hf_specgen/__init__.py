"""hf_specgen: speculative decoding behind `model.generate(..., assistant=...)`, without changing one token."""

from hf_specgen.check import Report, check
from hf_specgen.draft import Context, Draft, Drafter, DraftSession, Limit, Needs, Request, Verified
from hf_specgen.drafters.draft_model import DraftModel
from hf_specgen.drafters.plain import Plain
from hf_specgen.drafters.prompt_lookup import LookupStore, PromptLookup
from hf_specgen.explain import Difference, Explanation, explain_difference
from hf_specgen.generation import SpecGenMixin, disable, enable, speculate, stream
from hf_specgen.length import Fixed
from hf_specgen.outputs import SpeculativeOutput
from hf_specgen.probe import Probe
from hf_specgen.stats import Stats, Step
from hf_specgen.verify import BlockRejection, Matching, Rejection, Verifier

__all__ = [
    "BlockRejection",
    "Context",
    "Difference",
    "Draft",
    "DraftModel",
    "DraftSession",
    "Drafter",
    "Explanation",
    "Fixed",
    "Limit",
    "LookupStore",
    "Matching",
    "Needs",
    "Plain",
    "Probe",
    "PromptLookup",
    "Rejection",
    "Report",
    "Request",
    "SpecGenMixin",
    "SpeculativeOutput",
    "Stats",
    "Step",
    "Verified",
    "Verifier",
    "check",
    "disable",
    "enable",
    "explain_difference",
    "speculate",
    "stream",
]

__version__ = "0.1.0"
