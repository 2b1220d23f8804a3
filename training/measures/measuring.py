"""What a report measures: prompts, drafters with a fixed number of nodes, and the jobs done on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from learning.beginning import begin_as_layer
from texts import data
from torch import Tensor
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.bench import questions
from hf_specgen.bench.categories import Job, interleaved
from hf_specgen.bench.measure import Setting, timed
from hf_specgen.bench.outcomes import Compared
from hf_specgen.bench.questions import Question, pick
from hf_specgen.bench.table import PLAIN
from hf_specgen.cli import encode
from measures.positions import count

HELD_OUT = "held-out prompts"
BEFORE, AFTER = "before", "after"
FRESH = "fresh"
# How deep an EAGLE head's trees are: at 15 nodes, three a level.
DEPTH = 5


# ------------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """What is decoded from.

    Attributes:
        group: what its results are summed up under.
        ids: of the prompt.
    """

    group: str
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """The same for the same ids."""
        return hashlib.sha256(str(self.ids).encode()).hexdigest()[:12]

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Ids and mask, `(1, length)`."""
        ids = torch.tensor([self.ids], device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def held_out(source: str, number: int, tokenizer: Any = None) -> list[Prompt]:
    """Prompts of held-out rows, of one half of them and spread evenly over it: of each what precedes its first label.

    Args:
        source: as in `data.load`.
        number: how many, at most.
        tokenizer: of the target, where these are chats without ids.

    Raises:
        ValueError: no held-out row has a prompt and a label.
    """
    _, rows = data.halves(data.load(source, held_out=True, columns=["input_ids", "labels"], tokenizer=tokenizer))
    prompts = dict.fromkeys(filter(None, map(_prompt_of, rows)))
    if not prompts:
        raise ValueError(f"no held-out row of {source} has a prompt with an answer; name questions instead")
    return _spread(list(prompts), number)


def _prompt_of(row: Mapping[str, Any]) -> Prompt | None:
    labelled = (torch.as_tensor(row["labels"]) != -100).nonzero()
    first = int(labelled[0]) if len(labelled) else 0
    return Prompt(HELD_OUT, tuple(torch.as_tensor(row["input_ids"])[:first].tolist())) if first else None


def asked(file: Path, tokenizer: Any, number: int, categories: Sequence[str] | None = None) -> list[Prompt]:
    """Questions in Spec-Bench's form, and code edits; so many of each category, spread evenly over it.

    Raises:
        ValueError: there is no such category, or the file is another.
    """
    pools = questions.load(file)
    if unknown := sorted(set(categories or ()) - set(pools)):
        raise ValueError(f"{file.name} has no category {unknown[0]!r}, but {', '.join(pools)}")
    chosen = [
        one for name, pool in pools.items() if categories is None or name in categories for one in _spread(pool, number)
    ]
    return [Prompt(one.category, tuple(encode(tokenizer, one.prompt)["input_ids"][0].tolist())) for one in chosen]


def _spread(pool: Sequence[Any], number: int) -> list[Any]:
    return [one for (one,) in pick(pool, min(number, len(pool)))]


# ------------------------------------------------------------------------------------------------------------ drafters


def limited(drafter: sg.Drafter, nodes: int, depth: int | None = None, branches: int = 1) -> sg.Drafter:
    """The same drafter with a fixed number of nodes a round.

    Args:
        drafter: `Medusa` drafts trees as deep as it has heads, `Eagle` trees of `depth`, `DraftModel` a chain of all
            nodes, or trees of `branches` nodes a level.
        nodes: a round.
        depth: of EAGLE's trees.
        branches: of a sibling's.

    Raises:
        ValueError: it is another drafter.
    """
    if isinstance(drafter, sg.Medusa):
        return replace(drafter, nodes=nodes, num_assistant_tokens=min(nodes, drafter.heads.config.num_heads))
    if isinstance(drafter, sg.Eagle):
        return replace(drafter, nodes=nodes, num_assistant_tokens=min(nodes, depth or DEPTH))
    if isinstance(drafter, sg.DraftModel):
        return replace(drafter, branches=branches, num_assistant_tokens=max(1, nodes // branches))
    raise ValueError(f"a {type(drafter).__name__} has no number of nodes; Medusa, Eagle and DraftModel have")


def untrained(trained: sg.Drafter, target: PreTrainedModel) -> sg.Drafter:
    """Heads of the same shape, as training begins with them.

    Raises:
        ValueError: the drafter is a model, which began as another one.
    """
    if isinstance(trained, sg.Medusa):
        shape = trained.heads.config
        return sg.Medusa(
            sg.MedusaHeads.fresh(target, shape.num_heads, shape.num_layers, shape.lm_heads, shape.hidden_act)
        )
    if isinstance(trained, sg.Eagle):
        config, ids = trained.head.config, trained.head.to_target
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = sg.EagleHead.fresh(
                target,
                config.method,
                config.num_hidden_layers,
                config.feature_layers,
                None if ids is None else ids.tolist(),
            )
            begin_as_layer(head, target)  # as it does unless it is told otherwise
        return sg.Eagle(head)
    raise ValueError(f"--before {FRESH} is for heads: name the sibling's folder as it was before training")


# ---------------------------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Counting:
    """Does jobs: decodes a prompt with a drafter of fixed nodes and counts what is accepted.

    Attributes:
        model: the target, enabled.
        prompts: by name.
        new_tokens: the most that is decoded.
        drafters: by the setting's name.
    """

    model: Any
    prompts: Mapping[str, Prompt]
    new_tokens: int
    drafters: Mapping[str, sg.Drafter]

    def __call__(self, job: Job) -> dict[str, Any]:
        inputs = self.prompts[job.question].inputs(self.model.device)
        text, counts = count(self.model, inputs, self.drafters[job.setting], self.new_tokens)
        return {"text": text, "counts": asdict(counts)}


@dataclass(frozen=True)
class Timing:
    """Does jobs: decodes a prompt in a setting and times it. A setting's first run is preceded by one of 8 tokens.

    Attributes:
        model: the target, enabled.
        prompts: by name.
        new_tokens: the most that is decoded.
        settings: by name.
    """

    model: Any
    prompts: Mapping[str, Prompt]
    new_tokens: int
    settings: Mapping[str, Setting]
    _warm: set[str] = field(default_factory=set)

    def __call__(self, job: Job) -> dict[str, Any]:
        setting, inputs = self.settings[job.setting], self.prompts[job.question].inputs(self.model.device)
        lengths = [self.new_tokens] if job.setting in self._warm else [8, self.new_tokens]
        self._warm.add(job.setting)
        for length in lengths:
            limit = {"max_new_tokens": length}
            run = timed(self.model, inputs, replace(setting, arguments={**setting.arguments, **limit}))
        return asdict(run)


def compared(drafter: sg.Drafter, fixed: sg.Drafter) -> list[Compared]:
    """What is timed against `Plain()`: with the draft length on "auto", but for one.

    Args:
        drafter: as it was loaded.
        fixed: the same with a fixed number of nodes.
    """
    lookup = sg.PromptLookup()
    assistants: dict[str, Any] = {
        PLAIN: sg.Plain(),
        "drafter, fixed": fixed,
        "drafter": drafter,
        "PromptLookup()": lookup,
        '"auto"': "auto",
        "Merge(lookup, drafter)": sg.Merge(lookup, drafter),
        "FirstOf(lookup, drafter)": sg.FirstOf(lookup, drafter),
    }
    common: dict[str, Any] = {"do_sample": False}
    return [Compared(Setting(name, {**common, "assistant": one}, enabled=True)) for name, one in assistants.items()]


def jobs_of(prompts: Iterable[Prompt], conditions: Mapping[str, str], repeats: int = 1) -> list[Job]:
    """On each prompt the settings take turns.

    Args:
        prompts: to be decoded from.
        conditions: by setting, what its results depend on beside the prompt.
        repeats: of all settings on each prompt.
    """
    batches = [[Question(prompt.name, prompt.group, "")] for prompt in prompts]
    jobs = interleaved(batches, list(conditions), repeats)
    return [replace(job, conditions=conditions[job.setting]) for job in jobs]
