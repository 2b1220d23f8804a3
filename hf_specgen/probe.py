"""What a model's passes are worth, measured: several cached tokens in one pass against one token at a time.

Speculative decoding stands on one property of the model: a pass over several cached tokens gives what the same tokens
give one by one. Some models of transformers do not have it (Jamba, Mamba), and modelling code from elsewhere may not.
Whether two passes differ by more than rounding is judged by two controls, measured on the same model and prompts:

- `rounding`: the same logits computed without a cache in passes of different lengths, which differ by rounding alone;
  at least a few units of the last place. Norms, rotary angles and softmax are computed in float32 in whatever format
  the weights are, so that the last place is never finer than float32's.
- `context`: the logits without the tokens before, against those with them: what a state that is quite wrong does.

A fault lies near the second, rounding near the first, orders of magnitude apart; the line between them is their
geometric mean, so that it follows the number format by itself. Where they are not apart, as for a model that is nearly
flat in a coarse format, nothing can be told, and the verdict says so. Of 190 tiny models with random weights, right
ones mostly came to less than a hundredth of the line in float32; in one, and in bfloat16 in several, a few places went
beyond it. Jamba and the first Mamba came to 600 times the line and more in float32 and 2.7 times and more in bfloat16,
at nearly all places.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_specgen.draft import Draft
from hf_specgen.drafters.draft_model import eval_view
from hf_specgen.prompt import Prompt, input_device, prompt_of
from hf_specgen.target import TOKEN_TYPES, Target

# Lengths of the random prompts, and the tokens of each that are fed as blocks.
LENGTHS = (26, 19, 11)
BLOCK, SHORTEST = 8, 4
# A window up to here is gone past without being asked: longer prompts cost time on a large model.
LONGEST_WINDOW = 128
ROUNDS = 3
# Settings under which stock prepares for any model, whatever its defaults say.
PLAINLY: dict[str, Any] = {"do_sample": False, "num_beams": 1}
# From what rounding on a format is coarse, which part of the places is a few, and how wide the line is in a fine one.
COARSE, FEW, MARGIN = 1e-4, 1 / 4, 10
# Below this a logit is a mask's: some models block ids that way.
BLOCKED = -1e4


class Passes:
    """A model's own forward passes, prepared and continued as stock `generate` does it, for one row.

    Args:
        model: any that can generate.
        inputs: what its forward needs beside the ids of the text (encoder states, images).
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any] | None = None) -> None:
        self.model: Any = model
        self.inputs = inputs or {}

    def prompt(self, ids: Tensor, **settings: Any) -> tuple[Prompt, LogitsProcessorList]:
        """What stock prepares for a prompt of `ids`, `(1, n)`: inputs, an empty cache and the logits processors."""
        inputs = dict(self.inputs)
        for name in TOKEN_TYPES.keys() & inputs.keys():
            missing = ids.shape[1] - inputs[name].shape[1]
            follows = inputs[name][:, -1:] if TOKEN_TYPES[name] else torch.zeros_like(inputs[name][:, -1:])
            inputs[name] = torch.cat([inputs[name], follows.expand(-1, missing)], dim=1)
        decodes = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        if decodes == "input_ids" and "attention_mask" in inspect.signature(self.model.forward).parameters:
            inputs["attention_mask"] = torch.ones_like(ids)  # stock would hide ids that are also padding's
        caught: tuple[Prompt, LogitsProcessorList] = GenerationMixin.generate(
            self.model, **{decodes: ids}, **inputs, **settings, custom_generate=_caught
        )
        return caught

    @torch.no_grad()
    def whole(self, ids: Tensor, last: int | None = None) -> Tensor:
        """Logits of one pass over `ids`, `(1, n)`, without a cache.

        Args:
            ids: of the text.
            last: how many places are wanted; all of them by default.

        Returns:
            `(1, last, vocab)` float64 on the CPU.
        """
        prompt, _ = self.prompt(ids, **PLAINLY, max_new_tokens=BLOCK, use_cache=False)
        outputs = self._pass(prompt.input_ids, prompt.model_kwargs, last or ids.shape[1], is_first_iteration=True)
        return _logits(outputs, last or ids.shape[1])

    @torch.no_grad()
    def fed(self, ids: Tensor, widths: Sequence[int]) -> Tensor:
        """Logits of `ids` fed in passes of `widths` through the model's own cache.

        Returns:
            `(1, 1 + sum(widths[1:]), vocab)` float64 on the CPU: the last place of the first pass, every place of the
            others.
        """
        prompt, _ = self.prompt(ids[:, : widths[0]], **PLAINLY, max_new_tokens=sum(widths))
        kwargs, end = prompt.model_kwargs, widths[0]
        outputs = self._pass(prompt.input_ids, kwargs, 1, is_first_iteration=True)
        logits = [_logits(outputs, 1)]
        for width in widths[1:]:
            end += width
            kwargs = self.model._update_model_kwargs_for_generation(
                outputs, kwargs, self.model.config.is_encoder_decoder, num_new_tokens=width
            )
            # Stock may put a decoder's start in front.
            so_far = torch.cat([prompt.input_ids, ids[:, widths[0] : end]], dim=1)
            outputs = self._pass(so_far, kwargs, width, next_sequence_length=width)
            logits.append(_logits(outputs, width))
        return torch.cat(logits, dim=1)

    def _pass(self, ids: Tensor, kwargs: dict[str, Any], places: int, **which: Any) -> Any:
        inputs = self.model.prepare_inputs_for_generation(ids, **which, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = places
        return self.model(**inputs, return_dict=True)


def _caught(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> tuple[Prompt, LogitsProcessorList]:
    """A `custom_generate=` that hands back what transformers prepared."""
    return Prompt(input_ids, generation_config, model_kwargs), logits_processor


def _logits(outputs: Any, places: int) -> Tensor:
    """Those of the last places."""
    logits: Tensor = outputs.logits
    if logits.shape[1] < places:
        raise ValueError(f"of {places} tokens it returns logits for {logits.shape[1]}")
    return logits[:, -places:].to("cpu", torch.float64)


def apart(one: Tensor, other: Tensor) -> list[float]:
    """At each place the largest difference between two sets of logits, `(1, places, vocab)`, in spreads of the second.

    The spread is the standard deviation over the vocabulary; ids that the model blocks count for nothing.
    """
    seen = (one > BLOCKED) & (other > BLOCKED) | one.isnan()
    count = seen.sum(-1, keepdim=True)
    mean = other.where(seen, 0).sum(-1, keepdim=True) / count
    spread = ((other - mean).where(seen, 0).square().sum(-1, keepdim=True) / count).sqrt()
    largest = ((one - other).where(seen, 0).abs() / spread.clamp(min=1e-30)).amax(-1)
    return largest.nan_to_num(nan=math.inf).flatten().tolist()


@dataclass(frozen=True)
class Probe:
    """What the passes of a model came to. All differences are in spreads: standard deviations of a place's logits.

    Attributes:
        dtype: of the weights.
        rounding: what rounding does to the logits; see the module.
        context: what the tokens before do to them.
        block: several cached tokens in a pass against one at a time, stock's cache and forward: a difference a place.
        single: one cached token at a time against no cache at all.
        ours: this package's passes over ragged rows against no cache, by shape of draft; against one cached token at a
            time, where that is another thing. Empty where rows advance in lockstep.
        error: what the forward over several cached tokens raised.
        remarks: what was not reached.
    """

    dtype: str
    rounding: float
    context: float
    block: tuple[float, ...] = ()
    single: tuple[float, ...] = ()
    ours: dict[str, tuple[float, ...]] = field(default_factory=dict)
    error: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def line(self) -> float:
        """Between rounding and a fault: their geometric mean."""
        return math.sqrt(self.rounding * max(self.context, self.rounding))

    def is_fault(self, found: tuple[float, ...]) -> bool:
        """Whether differences are more than rounding.

        A fault shows at most places; rounding at a few may do as much, where it sends a token to other experts or is
        enlarged by layers that run many times. So a few places beyond the line are none, but in a fine format, where
        the line is a wide one, by far.
        """
        fine = self.rounding <= COARSE
        near, far = (self.line / MARGIN, self.line * MARGIN) if fine else (self.line, math.inf)
        return sum(one > near for one in found) > FEW * len(found) or max(found, default=0.0) > far

    @property
    def ok(self) -> bool:
        """The passes that a call makes agree with plain decoding, or cannot be told from it; see `verdict`."""
        # Where rows are ragged a call makes passes of our own, elsewhere the model's.
        return self.error is None and not any(map(self.is_fault, self.ours.values() or (self.block,)))

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.error is not None:
            return f"this model cannot take several cached tokens in one pass: {self.error}"
        if self.is_fault(self.block):
            differs = "this model's own multi-token cached forward differs from token-by-token decoding"
            return f"{differs}; this package's passes agree with the latter" if self.ok else differs
        if not self.ok:
            return "this package's passes differ from the model's own: please report it, with the model's config"
        if self.is_fault(self.single):
            return "several cached tokens agree with one at a time, but both differ from a pass without a cache"
        if self.line < 2 * self.rounding:
            return f"cannot be told in {self.dtype}: the context does little more than rounding does; try float32"
        return f"agrees to rounding of {self.dtype}"

    def __str__(self) -> str:
        """The verdict and the numbers."""
        numbers = {"several tokens a pass": self.block, "against no cache": self.single}
        numbers |= {f"our {shape}": found for shape, found in self.ours.items()}
        told = ", ".join(f"{name} {max(found):.1e}" for name, found in numbers.items() if found)
        controls = f"rounding {self.rounding:.1e}, context {self.context:.1e}, line at {self.line:.1e}"
        return "; ".join([self.verdict, *([f"largest differences in spreads: {told} ({controls})"] if told else [])])


def probe(model: PreTrainedModel, rows: Sequence[Sequence[int]] | None = None, ours: bool = True) -> Probe:
    """Compares passes over several cached tokens with passes over one, on the model as it is.

    Args:
        model: a target; nothing is written to it. In train mode an eval-mode view of it is looked at.
        rows: prompts as ids, `SHORTEST` or more each; random ones by default.
        ours: look at this package's passes too, where it has some of its own for this model.
    """
    model = eval_view(model)
    rows = random_rows(model) if rows is None else [list(row) for row in rows]
    if min(map(len, rows)) < SHORTEST:
        raise ValueError(f"a prompt to probe with needs {SHORTEST} tokens or more, not {min(map(len, rows))}")
    encoded = model.config.is_encoder_decoder
    passes = Passes(model, encoder_states(model, 1) if encoded else None)
    finest = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    found: dict[str, list[float]] = {"rounding": [4 * finest], "context": [0.0], "block": [], "single": []}
    error = None
    try:
        for row in rows:
            _probe_row(passes, torch.tensor([row], device=input_device(model)), found)
    except Exception as raised:  # whatever a model's code may raise over several tokens is the finding
        error = f"{type(raised).__name__}: {raised}"
    without = Probe(
        dtype=str(model.dtype).removeprefix("torch."),
        rounding=max(found["rounding"]),
        context=max(found["context"]),
        block=tuple(found["block"]),
        single=tuple(found["single"]),
        error=error,
        remarks=tuple(_not_reached(model.config.get_text_config(decoder=True), max(map(len, rows)))),
    )
    if ours and error is None and not encoded:
        with suppress(ValueError):  # a target that is refused
            return replace(without, ours=_our_passes(passes, rows, without.is_fault(without.single)))
    return without


def _probe_row(passes: Passes, ids: Tensor, found: dict[str, list[float]]) -> None:
    count = min(BLOCK, ids.shape[1] // 2)
    start = ids.shape[1] - count
    whole = passes.whole(ids, count + 1)
    places = sorted({0, count // 2, count})
    apiece = torch.cat([passes.whole(ids[:, : start + place], 1) for place in places], dim=1)
    found["rounding"] += apart(whole[:, places], apiece)
    found["context"] += apart(passes.whole(ids[:, start - 1 :]), whole)
    single = passes.fed(ids, [start, *[1] * count])
    found["single"] += apart(single[:, places], apiece)
    # Two blocks: the second stands on what the first left in the cache.
    found["block"] += apart(passes.fed(ids, [start, count - count // 3, count // 3]), single)


def _our_passes(passes: Passes, rows: Sequence[Sequence[int]], one_by_one: bool) -> dict[str, tuple[float, ...]]:
    """Ragged rows through our own cache, with rejections: every node against what its path should give."""
    found: dict[str, tuple[float, ...]] = {}
    chance = random.Random(0)
    for shape in ("chains", "trees"):
        target = Target(passes.model, prompt_of(passes.model, rows))
        if not target.ragged or (shape == "trees" and not target.trees):
            continue
        with torch.no_grad():
            target.prefill()
        target.cache.commit([()] * len(rows))
        texts = [[*row, chance.choice(list(row))] for row in rows]
        for _ in range(ROUNDS):
            draft = _random_draft(texts, target.trees, chance)
            paths = [_paths(parents) for parents in draft.parents.tolist()]
            with torch.no_grad():
                logits = target.verify(torch.tensor([text[-1] for text in texts]), draft.to(target.device)).logits
            kept = [chance.choice(leaves) for leaves in paths]
            kept = [path[: chance.randrange(len(path))] for path in kept]
            # Before any other pass: what a recurrent layer has seen of this one is noted by hooks.
            target.cache.commit(kept)
            for row, text in enumerate(texts):
                for path in paths[row]:
                    ids = torch.tensor([[*text, *_tokens(draft, row, path)]], device=target.device)
                    # Stock's way, from the prompt on, where a pass without a cache is not what decoding gives.
                    start, places = len(rows[row]), 1 + len(path)
                    steps = passes.fed(ids, [start, *[1] * (ids.shape[1] - start)]) if one_by_one else None
                    expected = passes.whole(ids, places) if steps is None else steps[:, -places:]
                    mine = logits[row : row + 1, [0, *path]].to("cpu", torch.float64)
                    found[shape] = found.get(shape, ()) + tuple(apart(mine, expected))
                # What is kept, and a token that was not drafted: the next root.
                text += [*_tokens(draft, row, kept[row]), chance.choice(text)]
        target.close()
    return found


def _tokens(draft: Draft, row: int, path: Sequence[int]) -> list[int]:
    return [int(draft.tokens[row, node - 1]) for node in path]


def _random_draft(texts: list[list[int]], trees: bool, chance: random.Random) -> Draft:
    """Two to five nodes a row, of ids that the row has, below random parents or in a chain."""
    counts = [chance.randrange(2, 6) for _ in texts]
    width = max(counts)
    tokens = [[chance.choice(text) for _ in range(width)] for text in texts]
    parents = [
        [(chance.randrange(node + 1) if trees else node) if node < count else -1 for node in range(width)]
        for count in counts
    ]
    return Draft(torch.tensor(tokens), torch.tensor(parents), is_chain=not trees)


def _paths(parents: list[int]) -> list[list[int]]:
    """For each leaf the nodes from the root's child down to it, counted from 1."""
    leaves = [node for node, parent in enumerate(parents, 1) if parent >= 0 and node not in parents]
    paths = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[0] - 1] > 0:
            path.insert(0, parents[path[0] - 1])
        paths.append(path)
    return paths


def random_rows(model: PreTrainedModel) -> list[list[int]]:
    """Random prompts, long enough to leave the windows of a model whose windows are short."""
    config = model.config.get_text_config(decoder=True)
    window = max((size for size in _windows(config) if size <= LONGEST_WINDOW), default=0)
    special = {*_special(model.config), *_special(config)}
    chance = random.Random(0)
    ordinary = [i for i in (chance.randrange(config.vocab_size) for _ in range(1000)) if i not in special]
    return [[chance.choice(ordinary) for _ in range(length + window)] for length in LENGTHS]


def _special(config: PreTrainedConfig) -> Iterable[int]:
    """Ids that a config gives a meaning: of images, of padding."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_index")):
            yield from (value if isinstance(value, list) else [value])


def _windows(config: PreTrainedConfig) -> list[int]:
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return [size for size in sizes if isinstance(size, int)]


def _not_reached(config: PreTrainedConfig, longest: int) -> Iterable[str]:
    for size in _windows(config):
        if size >= longest:
            yield f"the window of {size} tokens was not reached: pass longer input_ids="


@dataclass
class EncoderStates(BaseModelOutput):
    """What encoders return, those with experts included."""

    router_logits: tuple[Tensor, ...] | None = None
    router_probs: tuple[Tensor, ...] | None = None


def encoder_states(model: PreTrainedModel, batch: int, length: int = 12) -> dict[str, Any]:
    """Random states in the place of what an encoder would say, so that it need not be run."""
    width = model.config.get_text_config(encoder=True).hidden_size
    states = torch.randn((batch, length, width), generator=torch.Generator().manual_seed(0))
    return {"encoder_outputs": EncoderStates(last_hidden_state=states.to(input_device(model), model.dtype))}
