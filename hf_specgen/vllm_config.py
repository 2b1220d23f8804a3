"""Drafters from the fields of vLLM's `speculative_config`, those of today's versions and of earlier ones.

What has a meaning here is used, what would change nothing is passed over, and everything else is refused by name. In
vLLM `num_speculative_tokens` is the length of a chain; here it is how deep to draft.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen.draft import Drafter
from hf_specgen.drafters.medusa import Medusa
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.loading import Loaded, Location, drafter_of, load_once

ITSELF = "load it yourself and pass it as assistant="
MEASURED = "leave it and num_speculative_tokens out: how deep to draft is then decided by what is measured here"
LOSSLESS = "pass acceptance='matching', 'rejection' or 'block' to the call; nothing lossy is in the package"
ENGINE = "it is about vLLM's own engine: leave it out"

# Fields that mean nothing here: the values that change nothing, and what to do instead of any other.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), f"to split a drafter over devices, {ITSELF}"),
    "tensor_parallel_size": ((1,), f"to split a drafter over devices, {ITSELF}"),
    "quantization": ((), f"a checkpoint's own quantization is read from its config; to quantize a drafter, {ITSELF}"),
    "code_revision": ((), f"for code of another revision, {ITSELF}"),
    "max_model_len": ((), "a drafter drafts as far as its positions reach, and the text ends by max_new_tokens"),
    "parallel_drafting": (
        (False,),
        "heads trained for it (P-EAGLE, PARD) are not known here, and Medusa's do so without",
    ),
    "use_heterogeneous_vocab": ((False,), "pass assistant=hf_specgen.CrossVocabulary(model, tokenizer, method='tli')"),
    "disable_by_batch_size": ((), MEASURED),
    "num_speculative_tokens_per_batch_size": ((), MEASURED),
    "enable_adaptive_verification": ((False,), MEASURED),
    "rejection_sample_method": (("standard", "strict", "probabilistic"), LOSSLESS),
    "acceptance_method": (("rejection_sampler",), LOSSLESS),
    "posterior_threshold": ((), LOSSLESS),
    "posterior_alpha": ((), LOSSLESS),
    "synthetic_acceptance_rates": ((), LOSSLESS),
    "synthetic_acceptance_length": ((), LOSSLESS),
    "enforce_eager": ((False, True), ENGINE),
    "kv_cache_dtype": (("auto",), ENGINE),
    "moe_backend": (("auto",), ENGINE),
    "attention_backend": ((), ENGINE),
    "draft_load_config": ((), ENGINE),
    "disable_padded_drafter_batch": ((False,), ENGINE),
    "disable_eagle_block_drop": ((False,), ENGINE),
    "disable_logprobs": ((False, True), ENGINE),
    "disable_mqa_scorer": ((False,), ENGINE),
    "use_local_argmax_reduction": ((False,), ENGINE),
    "index_share_for_mtp_iteration": ((), ENGINE),
    "dspark_draft_topk": ((), ENGINE),
}

SAMPLES = {"greedy": False, "probabilistic": True}


def read_config(config: Mapping[str, Any], target: PreTrainedModel) -> tuple[Drafter, int | None, str | None]:
    """The drafter that a config describes.

    Args:
        config: fields of vLLM's `speculative_config`. `model` may also be a loaded model or head; `trust_remote_code`,
            which vLLM takes from its target, goes with it. Without a `method`, what `model` is decides.
        target: the model that it is to draft for.

    Returns:
        The drafter; how deep it is to draft, if the config says so; and what it was recognised as, in words, if it was
        loaded.

    Raises:
        ValueError: a method or field is none of vLLM's or has no meaning here, or contradicts what is loaded.
    """
    left = {name: value for name, value in config.items() if value is not None or name not in NEUTRAL}
    method = _method(left)
    tokens: int | None = left.pop("num_speculative_tokens", None)
    _pass_over(left)
    if method in LOOKUPS:
        lookup = LOOKUPS[method](left)
        _refuse_rest(method, left)
        return lookup, tokens, None
    wanted = Wanted.of(method, left)
    _refuse_rest(method, left)
    loaded = wanted.load(target)
    return loaded.drafter, wanted.depth(tokens), loaded.origin or None


def _method(left: dict[str, Any]) -> str | None:
    method = left.pop("method", None)
    if method is None and left.get("model") in ("ngram", "[ngram]"):  # as vLLM wrote it before there were methods
        del left["model"]
        return "ngram"
    if not (method is None and "model" in left) and not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, METHODS))}")
    return method


def _pass_over(left: dict[str, Any]) -> None:
    """Takes out what changes nothing.

    Raises:
        ValueError: it would change something.
    """
    for name in [name for name in left if name in NEUTRAL]:
        values, instead = NEUTRAL[name]
        if (value := left.pop(name)) not in values:
            raise ValueError(f"{name}={value!r} has no meaning here: {instead}")


def _refuse_rest(method: str | None, left: Mapping[str, Any]) -> None:
    if left:
        who = "a config without a method" if method is None else f"method={method!r}"
        raise ValueError(f"{who} takes no {', '.join(map(repr, left))}")


def _ngram(left: dict[str, Any]) -> Drafter:
    _drafts_greedily(left)
    # vLLM's defaults: where one bound is missing it equals the other.
    longest, shortest = left.pop("prompt_lookup_max", None), left.pop("prompt_lookup_min", None)
    shortest = longest if shortest is None else shortest
    longest = shortest if longest is None else longest
    return PromptLookup() if longest is None else PromptLookup(min_ngram=shortest, max_ngram=longest)


def _suffix(left: dict[str, Any]) -> Drafter:
    _drafts_greedily(left)
    if left.pop("suffix_decoding_max_cached_requests", 0):
        raise ValueError(
            "'suffix_decoding_max_cached_requests' keeps users' texts between calls: pass a store of your own instead, "
            "assistant=hf_specgen.SuffixLookup(store=hf_specgen.SuffixStore())"
        )
    names = {f"suffix_decoding_{name}": name for name in ("max_spec_factor", "min_token_prob")}
    settings = {names[name]: left.pop(name) for name in names.keys() & left.keys()}
    return SuffixLookup(**settings, num_assistant_tokens=left.pop("suffix_decoding_max_tree_depth", None))


def _drafts_greedily(left: dict[str, Any]) -> None:
    """Takes out what says that a lookup neither draws nor has a fixed tree."""
    if left.get("draft_sample_method") in (None, "greedy"):
        left.pop("draft_sample_method", None)
    if left.get("speculative_token_tree") is None:
        left.pop("speculative_token_tree", None)


LOOKUPS: dict[str | None, Callable[[dict[str, Any]], Drafter]] = {"ngram": _ngram, "suffix": _suffix}
TRAINED = ("draft_model", "medusa", "eagle", "eagle3")
METHODS = ("ngram", "suffix", *TRAINED)


@dataclass(frozen=True)
class Wanted:
    """A drafter that a config wants loaded.

    Attributes:
        method: what it is to be; None for whatever it is.
        model: where it is, or the loaded thing itself.
        sample: whether it draws its drafts; None for as it does without a config.
        tree: the nodes of a fixed tree as paths of ranks.
    """

    method: str | None
    model: Location | torch.nn.Module
    sample: bool | None
    tree: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, method: str | None, left: dict[str, Any]) -> Wanted:
        """Takes its fields out of a config; raises ValueError for values that they cannot have."""
        model, sample = left.pop("model", None), left.pop("draft_sample_method", None)
        if model is None:
            raise ValueError(f"method={method!r} needs 'model': a path, a hub id or a loaded {_loaded_kind(method)}")
        if not isinstance(model, str | PathLike | torch.nn.Module):
            raise ValueError(f"'model' is {model!r}; it must be a path, a hub id or a loaded {_loaded_kind(method)}")
        if sample is not None and sample not in SAMPLES:
            raise ValueError(f"draft_sample_method={sample!r} is not one of {', '.join(map(repr, SAMPLES))}")
        tree = _tree(left.pop("speculative_token_tree", None))
        if not isinstance(model, torch.nn.Module):
            revision, trust = left.pop("revision", None), bool(left.pop("trust_remote_code", False))
            model = Location.of(model, revision=revision, trust_remote_code=trust, as_model=method == "draft_model")
        return cls(method, model, None if sample is None else SAMPLES[sample], tree)

    def load(self, target: PreTrainedModel) -> Loaded:
        """Loads it, or takes it from where it was loaded before.

        Raises:
            ValueError: it cannot be loaded, or is of another kind.
        """
        if isinstance(self.model, Location):
            loaded, name = load_once(self.model, target), self.model.path
        else:
            loaded, name = replace(drafter_of(self.model), origin=""), type(self.model).__name__
        if self.method not in (None, loaded.method):
            told = f" ({loaded.origin})" if loaded.origin else ""
            raise ValueError(
                f"method={self.method!r}, but {name} is {loaded.method!r}{told}: say method={loaded.method!r}, "
                "or leave the method out"
            )
        drafter = loaded.drafter
        if self.tree is not None:
            if not isinstance(drafter, Medusa):
                raise ValueError(
                    f"speculative_token_tree has no meaning for {loaded.method!r}: {INSTEAD[loaded.method]}"
                )
            drafter = replace(drafter, choices=self.tree)
        return replace(loaded, drafter=drafter if self.sample is None else replace(drafter, sample=self.sample))

    def depth(self, tokens: int | None) -> int | None:
        """How deep to draft; beside a tree, vLLM counts nodes.

        Raises:
            ValueError: the two contradict each other.
        """
        if self.tree is None:
            return tokens
        if tokens not in (None, len(self.tree)):
            raise ValueError(f"num_speculative_tokens={tokens}, but speculative_token_tree has {len(self.tree)} nodes")
        return max(map(len, self.tree))


INSTEAD = {
    "draft_model": "pass assistant=hf_specgen.DraftModel(model, branches=...)",
    "eagle": "its tree grows each round where it is sure; hf_specgen.Eagle(head, top_k=..., nodes=...) bounds it",
    "eagle3": "its tree grows each round where it is sure; hf_specgen.Eagle(head, top_k=..., nodes=...) bounds it",
}


def _loaded_kind(method: str | None) -> str:
    return {"medusa": "MedusaHeads", "eagle": "EagleHead", "eagle3": "EagleHead"}.get(method or "", "causal LM")


def _tree(tree: Any) -> tuple[tuple[int, ...], ...] | None:
    """Paths of ranks, which vLLM has as the text of a list."""
    if tree is None:
        return None
    try:
        paths = tuple(tuple(path) for path in (ast.literal_eval(tree) if isinstance(tree, str) else tree))
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"speculative_token_tree={tree!r} is no list of paths such as [(0,), (0, 0)]") from error
    if not paths or not all(path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths):
        raise ValueError(f"speculative_token_tree={tree!r} is no list of paths such as [(0,), (0, 0)]")
    return paths
