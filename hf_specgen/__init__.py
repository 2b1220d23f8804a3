"""hf_specgen: speculative decoding behind `model.generate(..., assistant=...)`, without changing one token."""

from hf_specgen.check import Report, check
from hf_specgen.costs import Costs, Platform
from hf_specgen.draft import Context, Draft, Drafter, DraftSession, Limit, Needs, Request, Verified
from hf_specgen.drafters.cross_vocabulary import CrossVocabulary
from hf_specgen.drafters.draft_model import DraftModel
from hf_specgen.drafters.eagle import Eagle
from hf_specgen.drafters.first_of import FirstOf
from hf_specgen.drafters.layer_skip import LayerSkip
from hf_specgen.drafters.layer_view import SkipSet
from hf_specgen.drafters.lookahead import Lookahead
from hf_specgen.drafters.medusa import Medusa
from hf_specgen.drafters.medusa_accuracies import measure_accuracies
from hf_specgen.drafters.medusa_choices import choices_from
from hf_specgen.drafters.merge import Merge
from hf_specgen.drafters.plain import Plain
from hf_specgen.drafters.prompt_lookup import LookupStore, PromptLookup
from hf_specgen.drafters.skip_search import search_skip_set
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.drafters.suffix_store import SuffixStore
from hf_specgen.drafters.token_recycling import CandidateMatrix, TokenRecycling
from hf_specgen.explain import Difference, Explanation, explain_difference
from hf_specgen.export import Exported, export
from hf_specgen.generation import SpecGenMixin, disable, enable, speculate, stream
from hf_specgen.heads.eagle import EagleConfig, EagleHead
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.length import Auto, Controller, Fixed, Length, Situation
from hf_specgen.loading import load_assistant
from hf_specgen.outputs import SpeculativeOutput
from hf_specgen.probe import Probe
from hf_specgen.stats import Stats, Step
from hf_specgen.verify import BlockRejection, Matching, Rejection, Verifier

__all__ = [
    "Auto",
    "BlockRejection",
    "CandidateMatrix",
    "Context",
    "Controller",
    "Costs",
    "CrossVocabulary",
    "Difference",
    "Draft",
    "DraftModel",
    "DraftSession",
    "Drafter",
    "Eagle",
    "EagleConfig",
    "EagleHead",
    "Explanation",
    "Exported",
    "FirstOf",
    "Fixed",
    "LayerSkip",
    "Length",
    "Limit",
    "Lookahead",
    "LookupStore",
    "Matching",
    "Medusa",
    "MedusaConfig",
    "MedusaHeads",
    "Merge",
    "Needs",
    "Plain",
    "Platform",
    "Probe",
    "PromptLookup",
    "Rejection",
    "Report",
    "Request",
    "Situation",
    "SkipSet",
    "SpecGenMixin",
    "SpeculativeOutput",
    "Stats",
    "Step",
    "SuffixLookup",
    "SuffixStore",
    "TokenRecycling",
    "Verified",
    "Verifier",
    "check",
    "choices_from",
    "disable",
    "enable",
    "explain_difference",
    "export",
    "load_assistant",
    "measure_accuracies",
    "search_skip_set",
    "speculate",
    "stream",
]

__version__ = "0.1.0"
