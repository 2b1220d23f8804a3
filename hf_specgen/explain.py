"""Why two texts of one model differ: a near-tie that rounding decided, or something that should not be.

Two ways to compute the same logits round differently, and where the two best tokens are nearly tied, that decides which
of them is chosen; from there on the texts have nothing to do with one another. The first difference is therefore the
only one that says anything. Here the text before it is scored again, in the passes that plain decoding and speculation
make, and how far those are apart at that very place is the measure of a near-tie.
"""

from __future__ import annotations

import copy
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from hf_specgen.drafters.draft_model import eval_view
from hf_specgen.generation import Options
from hf_specgen.probe import BLOCK, Passes, Probe, probe
from hf_specgen.prompt import generative, input_device
from hf_specgen.sampling import Noise, Processors

# The passes compared are a handful, and a text is made of many: a difference may be a few times what they show.
FACTOR = 4.0
# Of the text before, this much tells whether the model's passes are worth anything.
PROBED = 64
# What says how a text was decoded and not what its scores are.
UNSCORED = {field.name for field in fields(Options)} | {"cache", "cache_implementation", "use_cache", "custom_generate"}
TEXTS = ("input_ids", "inputs", "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Difference:
    """Where one row's two texts part. Scores are logits after the processors, with the noise of the seed if sampled.

    Attributes:
        row: which.
        column: of the first token that differs, padding included.
        tokens: the two tokens, of the first text and of the second.
        scores: what each has in the re-score.
        best: the two best tokens of the re-score.
        gap: between those two.
        shortfall: how far the worse one of `tokens` is below the best token.
        rounding: the largest difference, in what lies between these tokens, of the passes that plain decoding and
            speculation make there.
        near_tie: the shortfall is no more than rounding can make; None where a score says nothing.
        scored_in: number format of the re-score.
    """

    row: int
    column: int
    tokens: tuple[int, int]
    scores: tuple[float, float] = (0.0, 0.0)
    best: tuple[int, int] = (0, 0)
    gap: float = 0.0
    shortfall: float = 0.0
    rounding: float = 0.0
    near_tie: bool | None = None
    scored_in: str = ""

    def told(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """A few lines."""

        def name(token: int) -> str:
            return str(token) if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"

        first, second = map(name, self.tokens)
        lines = [f"row {self.row} differs from column {self.column} on: {first} in the first, {second} in the second"]
        if self.near_tie is not None:
            best, next_best = map(name, self.best)
            apart = abs(self.scores[0] - self.scores[1])
            scored = (
                f"  scored again in {self.scored_in}: {self.scores[0]:.6g} and {self.scores[1]:.6g}, {apart:.2g} apart"
            )
            lines += [
                f"{scored}; the best two are {best} and {next_best}, {self.gap:.2g} apart",
                f"  the passes that decoding makes differ by up to {self.rounding:.2g} there",
                "  near-tie" if self.near_tie else "  not a near-tie",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """Why texts differ. `str()` tells it.

    Attributes:
        differences: one a row that differs, where a token differs.
        rows: how many rows were compared.
        longer: rows of which one text goes on where the other ends, and by how many tokens.
        remarks: what limits the answer.
        probe: what the model's passes are worth, over the text of the first difference; see `check`.
        tokenizer: to show tokens with.
    """

    differences: tuple[Difference, ...]
    rows: int
    longer: dict[int, int]
    remarks: tuple[str, ...] = ()
    probe: Probe | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def near_tie(self) -> bool | None:
        """Every difference is a near-tie; None if there is none, or a score says nothing."""
        verdicts = [difference.near_tie for difference in self.differences]
        return None if not verdicts or None in verdicts else all(verdicts)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.differences:
            return "same text, but for where it ends" if self.longer else "same text"
        if self.probe is not None and (not self.probe.ok or self.probe.is_fault(self.probe.single)):
            return self.probe.verdict
        if self.near_tie is None:
            return "nothing can be told from the scores"
        return "near-tie" if self.near_tie else "not a near-tie: this is a bug or another setting, please report"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """The verdict, then row by row."""
        lines = [self.verdict, *(difference.told(self.tokenizer) for difference in self.differences)]
        lines += [f"row {row}: one text goes on for {count} tokens" for row, count in self.longer.items()]
        return "\n".join([*lines, *self.remarks])


def explain_difference(
    model: nn.Module,
    first: Any,
    second: Any,
    *,
    attention_mask: Tensor | None = None,
    float32: bool = False,
    **settings: Any,
) -> Explanation:
    """Says whether two texts of one model part at a near-tie of its two best tokens, or for another reason.

        plain = model.generate(**inputs, do_sample=False)
        fast = model.generate(**inputs, do_sample=False, assistant=drafter)
        print(sg.explain_difference(model, plain, fast, **inputs, do_sample=False))

    Args:
        model: what made both texts. It is only read.
        first: ids with the prompt in front, as `generate` returns them: `(batch, columns)`, one row, or lists.
        second: the same of the other text.
        attention_mask: `(batch, prompt columns)` of the prompt, where it was padded; with an encoder, the encoder's.
        float32: score in a float32 copy of the model as well, if there is room for one; it lives as long as the call.
        **settings: what `generate` was given: its inputs, `do_sample`, `seed`, logits processors and so on. A sampled
            text can be explained where `seed` made it.

    Raises:
        ValueError: the texts have unequal numbers of rows, or no common prompt.
    """
    inner = generative(model)
    texts = _Texts.of(inner, first, second, settings, attention_mask)
    parted, longer = texts.compare()
    tokenizer = settings.get("tokenizer")
    if not parted:
        return Explanation((), len(texts.first), longer, tokenizer=tokenizer)
    remarks = ["the model is in training mode: dropout makes its texts random"] if inner.training else []
    view = eval_view(inner)
    scorer, reason = _Scorer.of(view, texts, settings)
    exact, missing = _float32_copy(view) if float32 and reason is None else (None, None)
    remarks += [remark for remark in (reason, missing) if remark is not None]
    differences = []
    for row, place in parted:
        ids = (texts.first[row][place], texts.second[row][place])
        difference = Difference(row, texts.padding[row] + place, ids)
        differences.append(difference if reason is not None else scorer.score(difference, place, exact))
    row, place = parted[0]
    text = texts.first[row][: place + BLOCK][-PROBED:]
    plain = len(text) >= 2 * BLOCK and not inner.config.is_encoder_decoder and not texts.inputs
    found = probe(view, [text], ours=False) if plain and reason is None else None
    return Explanation(tuple(differences), len(texts.first), longer, tuple(remarks), found, tokenizer)


@dataclass(frozen=True)
class _Texts:
    """Two texts row by row without their padding, and what they were made from.

    Attributes:
        first: ids of the first text.
        second: ids of the second.
        padding: places before each row's first token.
        prompt: for each row its prompt's tokens; 0 where nobody said.
        inputs: what the model's passes need beside the ids, all rows.
    """

    first: Rows
    second: Rows
    padding: Sequence[int]
    prompt: Sequence[int]
    inputs: dict[str, Any]

    @classmethod
    def of(
        cls, model: PreTrainedModel, first: Any, second: Any, settings: dict[str, Any], mask: Tensor | None
    ) -> _Texts:
        """Sorts what the user passed."""
        one, other = _rows(first), _rows(second)
        if len(one) != len(other):
            raise ValueError(f"the first text has {len(one)} rows and the second {len(other)}")
        inputs = {
            name: value
            for name, value in settings.items()
            if isinstance(value, Tensor | ModelOutput) and name not in UNSCORED and name not in TEXTS
        }
        prompt = settings.get("input_ids", settings.get("inputs"))
        if model.config.is_encoder_decoder:
            if prompt is not None:
                inputs["input_ids"] = prompt
            if mask is not None:
                inputs["attention_mask"] = mask
            prompt, mask = settings.get("decoder_input_ids"), None
        columns = 0 if prompt is None else prompt.shape[1]
        padding = [0] * len(one)
        if mask is not None:
            columns = mask.shape[1]
            padding = [int(row.argmax()) for row in _repeated(mask != 0, len(one)).int()]
        return cls(
            [row[pad:] for row, pad in zip(one, padding, strict=True)],
            [row[pad:] for row, pad in zip(other, padding, strict=True)],
            padding,
            [max(0, columns - pad) for pad in padding],
            inputs,
        )

    def compare(self) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Rows and places of the first tokens that differ, and by how much one text goes on where the other ends."""
        parted, longer = [], {}
        for row, (one, other) in enumerate(zip(self.first, self.second, strict=True)):
            place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if place is not None and place < max(1, self.prompt[row]):
                raise ValueError(f"the two texts of row {row} have no common prompt: they differ at token {place}")
            if place is not None:
                parted.append((row, place))
            elif len(one) != len(other):
                longer[row] = abs(len(one) - len(other))
        return parted, longer

    def inputs_of(self, row: int) -> dict[str, Any]:
        """What one row's passes need beside its ids.

        Raises:
            ValueError: they cannot be told apart row by row.
        """
        if len(self.first) == 1 or not self.inputs:
            return self.inputs
        alone = {}
        for name, value in self.inputs.items():
            if not isinstance(value, Tensor) or value.shape[0] not in (len(self.first), 1):
                raise ValueError(f"{name} cannot be divided into {len(self.first)} rows: explain one row at a time")
            alone[name] = value[row : row + 1] if value.shape[0] > 1 else value
        return alone


@dataclass(frozen=True)
class _Scorer:
    """Scores of the tokens that can follow a text, as they were when it was made.

    Attributes:
        model: in eval mode.
        texts: what is looked at.
        settings: of the call.
        noise: of the seed; None when greedy.
    """

    model: PreTrainedModel
    texts: _Texts
    settings: dict[str, Any]
    noise: Noise | None

    @classmethod
    def of(cls, model: PreTrainedModel, texts: _Texts, settings: dict[str, Any]) -> tuple[_Scorer, str | None]:
        """The scorer, and why the scores say nothing, if they do not."""
        kept = {name: value for name, value in settings.items() if name not in UNSCORED | {*TEXTS, *texts.inputs}}
        if kept.get("logits_processor"):
            kept["logits_processor"] = LogitsProcessorList(map(copy.copy, kept["logits_processor"]))
        if not kept.keys() & {"max_length", "max_new_tokens", "generation_config"}:
            kept["max_new_tokens"] = max(map(len, texts.first))
        scorer = cls(model, texts, kept, None)
        prompt, _ = Passes(model, texts.inputs_of(0)).prompt(_ids(texts.first[0][:1], model), **kept)
        if not prompt.generation_config.do_sample:
            return scorer, None
        seed, rule = settings.get("seed"), settings.get("acceptance") or "matching"
        if getattr(rule, "name", rule) != "matching":
            return scorer, f"acceptance={rule!r} keeps the distribution and not the text: two drafters make two texts"
        if seed is None:
            return scorer, "sampled without a seed: two texts are two draws; pass seed= to both calls, and here"
        return cls(model, texts, kept, Noise.of(seed, len(texts.first), "cpu")), None

    def score(self, difference: Difference, place: int, exact: PreTrainedModel | None) -> Difference:
        """Fills in what the scores say."""
        row = difference.row
        text = self.texts.first[row]
        passes = Passes(self.model, self.texts.inputs_of(row))
        before = _ids(text[:place], self.model)
        after = _ids(text[: place + BLOCK - 1], self.model)
        logits = [passes.whole(before, 1)[0, 0], passes.whole(after, after.shape[1] - place + 1)[0, 0]]
        if place > 1:
            width = min(BLOCK, place - 1)
            logits.append(passes.fed(before, [place - 1, 1])[0, -1])
            logits.append(passes.fed(before, [place - width, width])[0, -1])
            logits.append(passes.fed(after, [place - 1, after.shape[1] - place + 1])[0, 1])
        scored_in = self.model.dtype
        if exact is not None:
            with torch.autocast(before.device.type, enabled=False):
                logits.insert(0, Passes(exact, self.texts.inputs_of(row)).whole(before, 1)[0, 0])
            scored_in = exact.dtype
        scores = [self._processed(one, row, place) for one in logits]
        best = scores[0].topk(2)
        tokens = torch.tensor([*difference.tokens, *best.indices.tolist()])
        # The last place of a number of this size; parts of every model are computed in float32 at best.
        last_place = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)
        rounding = max(last_place * float(logits[0][tokens].abs().max()), _largest(scores, tokens))
        held = [float(score) for score in scores[0][list(difference.tokens)]]
        shortfall = float(best.values[0]) - min(held)
        return Difference(
            row=row,
            column=difference.column,
            tokens=difference.tokens,
            scores=(held[0], held[1]),
            best=(int(best.indices[0]), int(best.indices[1])),
            gap=float(best.values[0] - best.values[1]),
            shortfall=shortfall,
            rounding=rounding,
            near_tie=shortfall <= FACTOR * rounding,
            scored_in=str(scored_in).removeprefix("torch."),
        )

    def _processed(self, logits: Tensor, row: int, place: int) -> Tensor:
        """What a token is chosen by: `(vocab,)` float64."""
        text, start = self.texts.first[row], self.texts.prompt[row] or place
        passes = Passes(self.model, self.texts.inputs_of(row))
        processors = Processors(passes.prompt(_ids(text[:start], self.model), **self.settings)[1])
        scores = logits[None].float().to(input_device(self.model))
        if not processors.separable:
            for end in range(start, place):  # some remember what they were shown
                processors(_ids(text[:end], self.model), torch.zeros_like(scores))
        scores = processors(_ids(text[:place], self.model), scores)
        scores = scores.to("cpu", torch.float64)
        if self.noise is not None:
            bound = self.noise.rows([row]).at(torch.tensor([[place]]))
            scores = bound.perturb(scores.float().unsqueeze(1))[:, 0]
        return scores[0]


def _largest(scores: list[Tensor], tokens: Tensor) -> float:
    """The most that passes differ by in what lies between any two of the tokens; inf if not all allow the same ones."""
    chosen = torch.stack(scores)[:, tokens]
    allowed = chosen.isfinite()
    if bool((allowed != allowed[:1]).any()):
        return float("inf")
    chosen = chosen[:, allowed[0]]
    return max(float((one - other).max() - (one - other).min()) for one in chosen for other in chosen)


def _rows(text: Any) -> list[list[int]]:
    """Rows of ids from what `generate` returns, or from lists."""
    text = getattr(text, "sequences", text)
    rows: list[Any] = [row.tolist() if isinstance(row, Tensor) else row for row in text]
    return [list(row) for row in rows] if rows and not isinstance(rows[0], int) else [rows]


def _repeated(mask: Tensor, rows: int) -> Tensor:
    """A mask for `num_return_sequences` rows of each prompt."""
    return mask.repeat_interleave(rows // mask.shape[0], dim=0)


def _ids(text: Sequence[int], model: PreTrainedModel) -> Tensor:
    return torch.tensor([list(text)], device=input_device(model))


def _float32_copy(model: PreTrainedModel) -> tuple[PreTrainedModel | None, str | None]:
    """The same modules with float32 weights, or why there is none."""
    if model.dtype in (torch.float32, torch.float64):
        return None, None
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if any(tensor.device.type == "meta" for tensor in weights.values()):
        return None, "no float32 copy: the weights are offloaded"
    if getattr(model, "is_quantized", False):
        return None, "no float32 copy: the weights are quantized"
    bytes_ = sum(4 * tensor.numel() for tensor in weights.values())
    room = _room(model.device)
    if room is not None and bytes_ > 0.9 * room:
        return None, f"no float32 copy: it takes {bytes_ / 2**30:.1f} GiB, and {room / 2**30:.1f} are free"
    memo = {key: _upcast(tensor) for key, tensor in weights.items()}
    exact = copy.deepcopy(model, memo)
    if any(name in (exact.config._attn_implementation or "") for name in ("flash", "paged")):
        exact.set_attn_implementation("sdpa")  # those kernels take half precision only
    return exact, None


def _upcast(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    raised = tensor.detach().float()
    return nn.Parameter(raised, requires_grad=False) if isinstance(tensor, nn.Parameter) else raised


def _room(device: torch.device) -> int | None:
    """Bytes that are free; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    told = Path("/proc/meminfo")
    if told.exists():
        lines = dict(line.split(":", 1) for line in told.read_text(encoding="utf-8").splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
