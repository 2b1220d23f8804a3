"""Out to other engines: a drafter in the layout that one loads, the command that starts it, and a check of both."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specgen.draft import Drafter
from hf_specgen.drafters.draft_model import DraftModel
from hf_specgen.drafters.eagle import Eagle
from hf_specgen.drafters.medusa import Medusa
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.engines import ENGINES
from hf_specgen.engines.plan import Job, Plan, rebuilt, weights_of
from hf_specgen.engines.target import Target
from hf_specgen.files import whole_folder
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.layouts import layout_of, read_head, unknown
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.loading import UNLOADABLE
from hf_specgen.vllm_config import LOOKUPS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of a head's config: what no layout has a place for and no draft depends on.
REMEMBERED = {"target", "accuracies", "initializer_range", "attention_dropout", "feature_layers", "rope_parameters"}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        engine: for which it was.
        path: the folder.
        command: starts the engine with it, for a shell.
        config: the engine's own speculative config, or its flags by name.
        notes: what a person should know: versions, and settings that the engine decides for itself.
    """

    engine: str
    path: Path
    command: str
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """A drafter to be exported.

    Attributes:
        kind: as vLLM calls it.
        what: the head, the causal LM or the lookup.
        tokens: how deep it is to draft, if it says so.
        source: where it was loaded from, if it was.
    """

    kind: str
    what: Any
    tokens: int | None = None
    source: str | None = None


def export(
    drafter: Drafter | torch.nn.Module | str | PathLike[str] | Mapping[str, Any],
    to: str,
    out: str | PathLike[str],
    target: str | PathLike[str] | PreTrainedModel | None = None,
    num_speculative_tokens: int | None = None,
    dtype: str | None = None,
) -> Exported:
    """Writes a drafter in the layout that another engine loads, with the command and the config that start it.

    What was written is read back by this package's own loaders and must be the same head, bit for bit, before the
    folder appears. docs/export.md says what each engine takes and what it was checked against.

    Args:
        drafter: Medusa or EAGLE heads or a causal LM, as a path, a hub id, a network or a drafter; a lookup as
            "ngram", "suffix", a dict with vLLM's fields, or a drafter.
        to: "vllm", "speculators", "sglang", "tgi", "trtllm" or "lmdeploy".
        out: the folder, which must not be there yet, or be empty.
        target: the model it is for: a path, a hub id, or the loaded model; unless given, the one that the heads
            remember. Its LM head or embeddings are copied where a layout wants them and the head borrows them.
        num_speculative_tokens: how deep the engine is to draft; unless given, as many tokens as there are Medusa
            heads, and what is usual for others.
        dtype: "float32", "float16" or "bfloat16"; unless given, that of the drafter.

    Raises:
        ValueError: the engine does not take drafters of this kind, or has no words for one of its settings; or there
            is no such drafter, target or engine. Nothing is written then.
    """
    if to not in ENGINES:
        raise ValueError(f"to={to!r} is not one of {', '.join(map(repr, ENGINES))}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(map(repr, DTYPES))}")
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, not {num_speculative_tokens}")
    given = _given(drafter)
    if given.kind not in ENGINES[to]:
        raise ValueError(f"{to} takes no drafter of the kind {given.kind!r}; it takes {', '.join(ENGINES[to])}")
    ready = _in_dtype(given.what, None if dtype is None else DTYPES[dtype])
    recorded = TargetRecord.from_dict(getattr(getattr(ready, "config", None), "target", None) or {})
    folder, wanted = Path(out).expanduser().absolute(), num_speculative_tokens or given.tokens
    job = Job(to, Target.of(target, recorded), folder, wanted)
    if given.kind == "draft_model":
        _refuse_vocabulary(ready, job)
    if given.kind == "medusa" and job.depth(1) > ready.config.num_heads:
        raise ValueError(f"{ready.config.num_heads} Medusa heads draft no {wanted} tokens")
    plan = ENGINES[to][given.kind](ready, job)
    with whole_folder(folder) as place:
        _write(plan, place, given.source)
        if plan.tensors and plan.head is not None:
            _read_back(plan.head, place, to)
    return Exported(to, folder, plan.line, plan.speculative, plan.notes)


def _given(drafter: Any) -> Given:
    """What a user's drafter is.

    Raises:
        ValueError: it is none that any engine could take, or cannot be loaded.
    """
    if isinstance(drafter, Mapping):
        return _of_dict(dict(drafter))
    if drafter in ("ngram", "suffix"):
        return Given(drafter, LOOKUPS[drafter]({}))
    if isinstance(drafter, str | PathLike):
        return _loaded(fspath(drafter))
    tokens = getattr(drafter, "num_assistant_tokens", None)
    inner = {Medusa: "heads", Eagle: "head", DraftModel: "model"}.get(type(drafter))
    what = drafter if inner is None else getattr(drafter, inner)
    if isinstance(what, MedusaHeads):
        return Given("medusa", what, tokens)
    if isinstance(what, EagleHead):
        return Given(what.config.method, what, tokens)
    if isinstance(what, PromptLookup | SuffixLookup):
        return Given("ngram" if isinstance(what, PromptLookup) else "suffix", what, tokens)
    if isinstance(what, PreTrainedModel):
        return Given("draft_model", what, tokens, what.config.name_or_path or None)
    raise ValueError(
        f"no other engine takes a {type(what).__name__}; there are layouts for Medusa and EAGLE heads, causal LMs "
        "(merge an adapter into its model first), PromptLookup and SuffixLookup. Of a combination, export one part"
    )


def _of_dict(left: dict[str, Any]) -> Given:
    """A drafter by vLLM's fields."""
    method, tokens = left.pop("method", None), left.pop("num_speculative_tokens", None)
    if method in LOOKUPS:
        lookup = LOOKUPS[method](left)
        found = Given(str(method), lookup)
    else:
        model = left.pop("model", None)
        if model is None:
            raise ValueError(f"method={method!r} needs 'model': a path, a hub id or what was loaded")
        found = _given(model)
        if method not in (None, found.kind):
            raise ValueError(f"method={method!r}, but the model is {found.kind!r}")
    if left:
        raise ValueError(f"export takes no {', '.join(map(repr, left))} in a drafter's dict")
    return replace(found, tokens=tokens)


def _loaded(path: str) -> Given:
    checkpoint = Checkpoint.open(path)
    layout = layout_of(checkpoint)
    if layout is not None:
        head = layout.head(checkpoint)
        return Given(head.config.method if isinstance(head, EagleHead) else "medusa", head, source=path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except UNLOADABLE as error:
        raise ValueError(f"{unknown(checkpoint)}. And it is no causal LM: {error}") from error
    return Given("draft_model", model, source=path)


def _in_dtype(what: Any, dtype: torch.dtype | None) -> Any:
    """A head or model with all that it has on the CPU, in `dtype`; what was given stays as it is."""
    if isinstance(what, MedusaHeads | EagleHead):
        return rebuilt(what, weights_of(what, dtype))
    if isinstance(what, PreTrainedModel) and dtype not in (None, what.dtype):
        moved: Any = copy.deepcopy(what)
        return moved.to(dtype=dtype)
    return what


def _refuse_vocabulary(model: Any, job: Job) -> None:
    ours, theirs = model.config.get_text_config(decoder=True).vocab_size, job.target.vocab_size
    if theirs is not None and ours != theirs:
        raise ValueError(
            f"{job.engine} wants a drafter with the target's vocabulary; it has {ours} ids and {job.target.name} "
            f"{theirs}. Here it drafts by CrossVocabulary"
        )


def _write(plan: Plan, place: Path, source: str | None) -> None:
    """Fills the folder."""
    if plan.config is not None:
        (place / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in plan.tensors.items()}
        save_file(tensors, place / plan.file, metadata={"format": "pt"})
    elif plan.head is not None:
        plan.head.save_pretrained(place)
        _copy_tokenizer(source, place)
    for name, text in plan.texts.items():
        (place / name).write_text(text, encoding="utf-8")
    said = "".join(f"# {note}\n" for note in plan.notes)
    (place / "launch.sh").write_text(f"#!/bin/sh\n{said}{plan.line}\n", encoding="utf-8")
    text = json.dumps(plan.speculative, indent=2) + "\n"
    (place / "speculative_config.json").write_text(text, encoding="utf-8")


def _copy_tokenizer(source: str | None, place: Path) -> None:
    """Engines that compare vocabularies look for the drafter's tokenizer beside it."""
    try:
        if source is not None:
            AutoTokenizer.from_pretrained(source).save_pretrained(place)
    except (OSError, ValueError):
        return


def _read_back(head: PreTrainedModel, place: Path, engine: str) -> None:
    """Reads what was written, as anybody's checkpoint, and compares it with the head.

    Raises:
        ValueError: something of the head did not come back: the layout has no place for it.
    """
    read = read_head(Checkpoint.open(place))
    wrote, came = head.state_dict(), read.state_dict()
    lost = sorted(
        name
        for name in wrote.keys() | came.keys()
        if name not in wrote or name not in came or not _same(wrote[name], came[name])
    )
    ours, theirs = head.config.to_dict(), read.config.to_dict()
    known = [name for name in type(head.config).__annotations__ if name in ours and name not in REMEMBERED]
    lost += [name for name in known if theirs[name] is not None and theirs[name] != ours[name]]
    if isinstance(head, EagleHead):
        lost += [] if _turns(ours) == _turns(theirs) else ["rope_parameters"]
    if lost:
        raise ValueError(f"the layout of {engine} has no place for {', '.join(lost)} of this head")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _turns(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **(config.get("rope_parameters") or {})}
