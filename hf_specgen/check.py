"""What a call will use and what it is refused, told before it runs.

Nothing here knows a family by name: the call is prepared by the code that `generate` runs, on a stand-in of the prompt,
and stops where the first pass would be made.
"""

from __future__ import annotations

import copy
import html
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specgen import attention
from hf_specgen.assistants import resolve
from hf_specgen.drafters.plain import Plain
from hf_specgen.generation import Prepared, rehearse
from hf_specgen.length import Fixed
from hf_specgen.probe import SHORTEST, Probe, encoder_states, probe
from hf_specgen.prompt import generative, input_device
from hf_specgen.rope import switches
from hf_specgen.target import TOKEN_TYPES, one_thread

WIDTH = 100
# What `generate` raises for a call that it does not take: a wrong value, a package that is missing.
REFUSALS = (ValueError, TypeError, NotImplementedError, ImportError)


@dataclass(frozen=True)
class Report:
    """What a call will use. `str()` is a table of it.

    Attributes:
        model: its class, model type, number format and device.
        assistant: what drafts.
        ok: the call is served; with `probe=True` also that the probe found nothing.
        recognised: what an assistant that is loaded from a path or hub id was recognised as, its size, and what it says
            it was trained for; None where nothing is loaded.
        refusal: what `generate` would raise, and what to do instead; None if it would run.
        at_fault: what has to change for the call to be served: "assistant", "arguments" or "model"; None if it would.
        cache: "SlotCache", or "CropCache" with why it is that one; None, as all below, where the target is refused.
        drafts: whether drafts may branch, and if not, why.
        rows: whether the rows of a batch advance each by itself, and if not, why.
        attention: which attention function runs.
        positions: where rotary embeddings change with the length of a text; None where they do not.
        threads: how many calls one model serves at once.
        acceptance: the accept rule.
        num_assistant_tokens: how deep drafts are, before a row's end cuts them; "auto" where costs decide.
        vocabularies: how the drafter's compares with the target's; None where nothing can be said.
        probe: what the passes came to, where they were asked for.
    """

    model: str
    assistant: str
    recognised: str | None = None
    ok: bool = True
    refusal: str | None = None
    at_fault: str | None = None
    cache: str | None = None
    drafts: str | None = None
    rows: str | None = None
    attention: str | None = None
    positions: str | None = None
    threads: str | None = None
    acceptance: str | None = None
    num_assistant_tokens: int | str | None = None
    vocabularies: str | None = None
    probe: Probe | None = None

    def table(self) -> list[tuple[str, str]]:
        """Names and values, what is not known left out."""
        lines = [("model", self.model), ("assistant", self.assistant)]
        lines += [("recognised as", self.recognised)] if self.recognised else []
        if self.refusal is None:
            lines.append(("verdict", "served"))
        else:
            lines += [("verdict", f"refused, because of the {self.at_fault}"), ("refusal", self.refusal)]
        told = {
            "cache": self.cache,
            "drafts": self.drafts,
            "draft length": self.num_assistant_tokens,
            "rows": self.rows,
            "attention": self.attention,
            "positions": self.positions,
            "threads": self.threads,
            "acceptance": self.acceptance,
            "vocabularies": self.vocabularies,
            "probe": self.probe,
        }
        lines += [(name, str(value)) for name, value in told.items() if value is not None]
        return lines + [("", remark) for remark in (self.probe.remarks if self.probe else ())]

    def __str__(self) -> str:
        """The table in plain text."""
        lines = self.table()
        margin = max(len(name) for name, _ in lines) + 2
        told = []
        for name, value in lines:
            first, *others = textwrap.wrap(value, WIDTH - margin) or [""]
            told.append(name.ljust(margin) + first)
            told += [" " * margin + other for other in others]
        return "\n".join(told)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in self.table())
        return f"<table>{''.join(cells)}</table>"


def check(
    model: torch.nn.Module, assistant: Any = None, *, probe: bool = False, batch: int | None = None, **kwargs: Any
) -> Report:
    """Says what `model.generate(..., assistant=assistant)` on an enabled model will use, and what it will refuse.

        print(sg.check(model, small_model, batch=4, max_new_tokens=500))

    Nothing is run, unless a probe is asked for: the prompt's shape matters and not its ids. An assistant that is a path
    is loaded, as by `generate`.

    Args:
        model: the target, enabled or not, or a wrapper around one.
        assistant: as for `generate`. None looks at the target alone.
        probe: measure on the model that passes over several cached tokens give what passes over one give, which takes
            about a hundred passes (minutes for a model of 135M on a CPU); see `Probe`. It looks at the prompts in
            `input_ids=`, or at random ones.
        batch: rows, where no prompt is given; 1 by default.
        **kwargs: anything else that `generate` takes: `max_new_tokens`, `cache_implementation`, `acceptance`,
            `tokenizer`, `input_ids` and so on.

    Returns:
        A report; a call that `generate` refuses is one with `ok=False`.

    Raises:
        ValueError: `model` is not a loaded model, or batch and `input_ids` are not what they can be.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model={model!r} is not a loaded model; `hf-specgen check` takes a path or hub id")
    _refuse_question(batch, kwargs.get("input_ids"))
    asked = {**kwargs, "assistant": Plain() if assistant is None else assistant}
    report = Report(
        model=_named(model), assistant="none: the target alone" if assistant is None else _called(assistant)
    )
    report = replace(report, recognised=_recognised(model, assistant))
    prepared, refusal = _attempt(model, batch, asked)
    if prepared is not None:
        report = _told(report, model, prepared)
        if assistant is None:
            report = replace(report, num_assistant_tokens=None)
    else:
        without, _ = _attempt(model, batch, {**asked, "assistant": Plain()})
        bare, _ = (without, None) if without is not None else _attempt(model, None, {"assistant": Plain()})
        at_fault = "model" if bare is None else "assistant" if without is not None else "arguments"
        if without is not None:
            # Only what it says of the target holds.
            told = _told(report, model, without)
            report = replace(told, num_assistant_tokens=None, vocabularies=None)
        report = replace(report, ok=False, refusal=refusal, at_fault=at_fault)
    if probe:
        found = _probed(model, kwargs)
        report = replace(report, probe=found, ok=report.ok and found.ok)
    return report


def _recognised(model: torch.nn.Module, assistant: Any) -> str | None:
    """What is to be loaded turns out to be; a refusal is told by the attempt that follows."""
    if not isinstance(assistant, str | PathLike | Mapping):
        return None
    try:
        return resolve(assistant, generative(model)).origin
    except REFUSALS:
        return None


def _refuse_question(batch: int | None, ids: Any) -> None:
    """Raises ValueError for what no call could be made of."""
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} is no number of rows")
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError("input_ids must be a tensor of shape (batch, length), as a tokenizer returns it")
    if batch is not None and batch != ids.shape[0]:
        raise ValueError(f"batch={batch} and input_ids of {ids.shape[0]} rows contradict each other")


def _attempt(model: torch.nn.Module, batch: int | None, kwargs: dict[str, Any]) -> tuple[Prepared | None, str | None]:
    """A call as far as its first pass, or what it raises."""
    try:
        with warnings.catch_warnings(action="ignore"):  # what transformers advises of a call is not asked here
            return rehearse(model, **_stand_in(generative(model), batch, kwargs)), None
    except REFUSALS as error:
        return None, str(error)


def _stand_in(model: PreTrainedModel, batch: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that nothing need be computed for, of the same shape."""
    dropped = {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, *TOKEN_TYPES, "inputs"}
    stand_in = {name: value for name, value in kwargs.items() if name not in dropped}
    main = model.main_input_name
    given = next((kwargs[name] for name in ("inputs", main, "input_ids") if kwargs.get(name) is not None), None)
    rows = (batch or 1) if given is None else given.shape[0]
    device = input_device(model)
    if model.config.is_encoder_decoder:
        stand_in.setdefault("encoder_outputs", encoder_states(model, rows)["encoder_outputs"])
        # What the encoder reads; only a drafter that has one of its own would look at it.
        blank = torch.ones((rows, 1), dtype=torch.long) if main == "input_ids" else torch.zeros((rows, 1, 1))
        stand_in[main] = blank.to(device) if given is None else given
    elif kwargs.get("inputs_embeds") is None:
        shape = (rows, 1) if given is None else tuple(given.shape)
        stand_in["input_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
        # Ids of 0 may be padding's.
        stand_in.setdefault("attention_mask", torch.ones_like(stand_in["input_ids"]))
    if kwargs.get("cache") is not None:
        stand_in["cache"] = copy.copy(kwargs["cache"])  # transformers marks what it is handed
    stand_in.setdefault("seed", 0)  # without one, sampling would draw one from torch's generator
    return stand_in


def _told(report: Report, model: torch.nn.Module, prepared: Prepared) -> Report:
    """The report of a call that is served."""
    call, reasons = prepared.call, prepared.reasons
    slots = "SlotCache: keys and values in buffers, rolled back by setting a length"
    vocabularies = getattr(call.session, "vocabularies", None)
    return replace(
        report,
        cache=slots if reasons.cropped is None else f"CropCache: {reasons.cropped}",
        drafts="chains and trees" if reasons.chains is None else f"chains only: {reasons.chains}",
        rows="each by itself" if reasons.lockstep is None else f"in lockstep: {reasons.lockstep}",
        attention=_attention(generative(model)),
        positions=_positions(generative(model)),
        threads=_threads(generative(model)),
        acceptance=call.walk.rules.verifier.name,
        num_assistant_tokens=call.controller.tokens if isinstance(call.controller, Fixed) else "auto",
        vocabularies=vocabularies or None,
    )


def _threads(model: PreTrainedModel) -> str:
    reason = one_thread(model)
    return "any number of calls at once" if reason is None else f"one call at a time: {reason}"


def _positions(model: PreTrainedModel) -> str | None:
    """What moves with the length of a text."""
    moving = sorted(switches(model), key=lambda switch: switch.position)
    told = [f"{switch.kind} changes at {switch.position}: no pass crosses it" for switch in moving]
    return "; ".join(told) or None


def _attention(model: PreTrainedModel) -> str:
    if attention.is_installed(model):
        return "grouped-query attention that copies no keys and values, set by enable"
    stock = model.config.get_text_config(decoder=True)._attn_implementation
    if attention.would_install(model):
        return f"{stock}; enable puts grouped-query attention that copies no keys and values in its place"
    return f"{stock}, as transformers has it"


def _probed(model: torch.nn.Module, kwargs: dict[str, Any]) -> Probe:
    inner = generative(model)
    ids: Tensor | None = kwargs.get("input_ids", kwargs.get("inputs"))
    if ids is None or inner.config.is_encoder_decoder:
        return probe(inner)
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    rows = [row[keep != 0].tolist() for row, keep in zip(ids, mask, strict=True)]
    return probe(inner, [row for row in rows if len(row) >= SHORTEST] or None)


def _named(model: torch.nn.Module) -> str:
    wrapped = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not wrapped:
        return type(model).__name__
    inner = wrapped[0]
    around = "" if inner is model else f"{type(model).__name__} of "
    kind = str(inner.dtype).removeprefix("torch.")
    return f"{around}{type(inner).__name__} ({inner.config.model_type}), {kind} on {inner.device}"


def _called(assistant: Any) -> str:
    """A short name: a drafter's repr may hold a whole model."""
    if isinstance(assistant, torch.nn.Module):
        return _named(assistant)
    if isinstance(assistant, str | PathLike | Mapping):
        return repr(assistant)
    parts = (getattr(assistant, name, None) for name in ("model", "heads", "head"))
    around = next((f" of {_named(part)}" for part in parts if isinstance(part, torch.nn.Module)), "")
    return f"{type(assistant).__name__}{around}" if not isinstance(assistant, type) else repr(assistant)
