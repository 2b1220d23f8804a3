"""Which layers a model can best spare while it drafts for itself: a search by measured agreement.

Draft & Verify (arXiv 2309.08168) and SWIFT (arXiv 2410.06916) search the same sets by Bayesian optimisation.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from hf_specgen.drafters.draft_model import eval_view
from hf_specgen.drafters.layer_skip import refuse
from hf_specgen.drafters.layer_view import Decoder, SkipSet, halves, view_of, why_not_skipped
from hf_specgen.prompt import generative, input_device

logger = logging.getLogger(__name__)

# The longest draft that a set is valued for.
MOST_DRAFTED = 8
# Sets that grow by one half are tried until so many in a row were worse.
PATIENCE = 4


def search_skip_set(
    model: nn.Module,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 48,
    budget: int = 200,
    seed: int = 0,
) -> SkipSet:
    """Finds what a model can leave out to draft for itself fastest, on its own greedy continuations of a few prompts.

    One pass of a view over a text says for each token whether the view would have drafted it. A set is worth the
    speed-up that this acceptance promises, if a draft costs what its share of the weights is and a verify pass costs
    one step. First each half of a layer is left out by itself, then more and more of them beginning with those that
    are missed least, then one or two are exchanged at random. The same arguments find the same set.

    Args:
        model: a causal LM, or a wrapper around one. It is not written to.
        prompts: texts, or rows of ids. Take some of the kind that will be asked.
        tokenizer: for texts.
        max_new_tokens: of each continuation.
        budget: how many sets to try; each costs a pass over all texts.
        seed: of the exchanges.

    Returns:
        The best set, to be saved or given to `LayerSkip(skip=...)`. Its `speed` may lie below 1, plain decoding's.

    Raises:
        ValueError: nothing can be left out of this model, or there is nothing to look at.
    """
    if not prompts or budget < 1:
        raise ValueError("search_skip_set needs at least one prompt and a budget of at least 1")
    inner = generative(model)
    refuse(inner)
    search = _Search(eval_view(inner), _rows(prompts, tokenizer), max_new_tokens, budget)
    with _progress(budget) as search.advance:
        search.one_by_one()
        search.grow()
        search.exchange(random.Random(seed))
    found = search.best(seed)
    if found.speed is not None and found.speed <= 1:
        logger.warning(
            "no set was found that promises to be faster than plain decoding; the best promises %.2f of it", found.speed
        )
    return found


def promised_speed(acceptance: float, cost: float) -> float:
    """The speed-up of the best draft length, if each token is accepted with this chance.

    Args:
        acceptance: of a token whose forerunners were accepted.
        cost: of a drafted token, in steps of plain decoding.
    """
    return max(
        sum(acceptance**drafted for drafted in range(length + 1)) / (1 + length * cost)
        for length in range(1, MOST_DRAFTED + 1)
    )


class _Search:
    """What was tried so far.

    Args:
        model: in eval mode.
        rows: ids of the prompts.
        new: tokens of each continuation.
        budget: how many sets to try.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Sequence[int]], new: int, budget: int) -> None:
        self.model = model
        self.layers = Decoder.of(model).layers
        self.units = _units(model)
        self.budget = budget
        self.advance: Callable[[], None] = lambda: None
        # For each set of units: speed, acceptance and cost. The first of equal ones is the best.
        self.tried: dict[frozenset[int], tuple[float, float, float]] = {}
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._weights = sum(map(_size, self.layers)) + (0 if head is None else _size(head))
        device = input_device(model)
        self._texts: list[tuple[Tensor, Tensor]] = []
        for row in rows:
            ids = torch.tensor([row], device=device)
            generate: Any = model.generate
            text = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
            self._texts.append((text, self._choices(model, text, text.shape[1] - len(row))))

    def one_by_one(self) -> None:
        """Each unit by itself."""
        for unit in range(len(self.units)):
            self._try({unit})

    def grow(self) -> None:
        """The units that were missed least, more and more of them."""
        alone = {
            unit: self.tried[one][1] for unit in range(len(self.units)) if (one := frozenset({unit})) in self.tried
        }
        ranked = sorted(alone, key=lambda unit: (-alone[unit], unit))
        fastest, worse = 0.0, 0
        for count in range(2, len(ranked)):
            speed = self._try(set(ranked[:count]))
            fastest, worse = (speed, 0) if speed > fastest else (fastest, worse + 1)
            if worse == PATIENCE:
                return

    def exchange(self, chance: random.Random) -> None:
        """One or two units more or less than the best set has, at random."""
        # In a small model there may be fewer sets than the budget allows.
        for _ in range(20 * self.budget):
            if len(self.tried) >= self.budget:
                return
            flipped = chance.sample(range(len(self.units)), min(chance.choice((1, 2)), len(self.units)))
            self._try(set(self._fastest().symmetric_difference(flipped)))

    def best(self, seed: int) -> SkipSet:
        """The fastest set, with what is known of it."""
        units = self._fastest()
        speed, acceptance, cost = self.tried[units]
        attention, mlp = self._parts(units)
        return SkipSet(
            attention=attention,
            mlp=mlp,
            layers=len(self.layers),
            model=self.model.config.name_or_path or type(self.model).__name__,
            acceptance=acceptance,
            cost=cost,
            speed=speed,
            evaluations=len(self.tried),
            seed=seed,
        )

    def _fastest(self) -> frozenset[int]:
        return max(self.tried, key=lambda units: self.tried[units][0])

    def _parts(self, units: Sequence[int] | frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers without attention, and without MLP."""
        parts = [self.units[unit] for unit in sorted(units)]
        return tuple(i for part in parts for i in part.attention), tuple(i for part in parts for i in part.mlp)

    def _try(self, units: set[int]) -> float:
        """The speed of a set; 0 for one that cannot be or that there is no budget for."""
        key = frozenset(units)
        if key in self.tried:
            return self.tried[key][0]
        skip = SkipSet(*self._parts(key))
        if not key or len(self.tried) >= self.budget or why_not_skipped(self.model, skip) is not None:
            return 0.0
        view = view_of(self.model, skip)
        right = total = 0
        for text, wanted in self._texts:
            right += int((self._choices(view, text, len(wanted)) == wanted).sum())
            total += len(wanted)
        acceptance = right / total
        cost = 1 - sum(_left_out(self.layers, skip)) / self._weights
        self.tried[key] = (promised_speed(acceptance, cost), acceptance, cost)
        self.advance()
        return self.tried[key][0]

    @staticmethod
    @torch.no_grad()
    def _choices(model: Any, text: Tensor, count: int) -> Tensor:
        """`(count,)` the most likely ids in the last places of a text, each from the true tokens before it."""
        kept = {"logits_to_keep": count + 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        logits: Tensor = model(input_ids=text, use_cache=False, return_dict=True, **kept).logits
        return logits[0, -count - 1 : -1].argmax(-1)


def _left_out(layers: Sequence[nn.Module], skip: SkipSet) -> Iterator[int]:
    """The weights that a set leaves out, in parts."""
    for index in {*skip.attention, *skip.mlp}:
        if index in skip.both:
            yield _size(layers[index])
        else:
            attention, mlp = halves(layers[index])
            part = attention if index in skip.attention else mlp
            assert part is not None
            yield _size(part)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _units(model: PreTrainedModel) -> list[SkipSet]:
    """What can be left out by itself: both halves of a layer, or where that cannot be a whole one."""
    units: list[SkipSet] = []
    reason = None
    for index in range(len(Decoder.of(model).layers)):
        parts = [SkipSet(attention=(index,)), SkipSet(mlp=(index,))]
        if any(why_not_skipped(model, part) for part in parts):
            parts = [SkipSet.whole([index])]
        reason = reason or why_not_skipped(model, parts[0])
        units += [part for part in parts if why_not_skipped(model, part) is None]
    if len(units) < 2:
        raise ValueError(f"{type(model).__name__} has no layers to choose from: {reason}")
    return units


def _rows(
    prompts: Sequence[str] | Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase | None
) -> list[Sequence[int]]:
    rows: list[Sequence[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            rows.append(prompt)
        elif tokenizer is None:
            raise ValueError("search_skip_set needs tokenizer= for prompts that are texts")
        else:
            rows.append(tokenizer(prompt).input_ids)
    return rows


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar, rich's where that is installed; what it gives advances it."""
    try:
        from rich.progress import Progress
    except ImportError:
        with tqdm(total=total, desc="searching a skip set") as bar:
            yield lambda: bar.update(1)
        return
    with Progress(transient=True) as progress:
        task = progress.add_task("searching a skip set", total=total)
        yield lambda: progress.advance(task)
