"""What every family of transformers does with `assistant=`: the same as stock, or a refusal by name.

`docs/support.md` says it for each family of `families.FAMILIES`, and these tests hold the page to it: the named
families in every run, all of them in `make test-all`. With SUPPORT=write in the environment the tests write what they
find into the page instead, for the families they run for; `make support` does so for all.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import families
import pytest
import support
import torch
import transformers
from families import FAMILIES, NAMED, NotBuiltError
from support import CHAIN, EXACT, NONE, PAGE, REFUSED, STOCK, WRONG, Row
from test_mutants import a_node_sees_every_node_before_it, positions_are_node_indices, the_window_is_ignored
from tiny import Prompt, Scripted, ScriptedSession
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.cache import CropCache
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.probe import Probe, probe

NEW = 24
# Past a window of 8 from the first token on; from before it to past it; three rows, of which one begins before it.
PAST = Prompt.random((14, 9))
ACROSS = Prompt.random((3, 4))
RAGGED = Prompt.random((20, 1), (7, 2), (13, 3))
# What is said in a conversation after the first answer.
AGAIN = Prompt.random((4, 6))

# The share of drafted places without the true token, where a sixth would not reject in most rounds.
SPOILED = {"ragged batch": 1 / 8, "continued": 1 / 4}

# The named families that are refused, and what the message must say.
NAMED_REFUSALS = {
    "nemotron_h": "time step",
    "jamba": "do not go on from its cache",
    "mamba": "do not go on from its cache",
    "recurrent_gemma": "recurrent state",
}
# How many families must at least be exact in chains, trees and ragged batches, and how many in these or in chains only.
EXACT_FAMILIES, WITH_CHAINS = 121, 178

# Logits, in standard deviations. transformers hands them out in float32; a family that computes in float32 inside, such
# as the state of a mixer or a router, or in the whole, rounds wherever the number of tokens in a pass changes a sum.
# What the mutants do is larger by orders of magnitude.
TOLERANCE, ROUNDED, FLOAT32 = 1e-6, 1e-4, 1e-3


class StockError(Exception):
    """Stock raised, where ours may not have."""


class Later(Sequence[Sequence[int]]):
    """Texts that are computed when the first of them is asked for: not at all where a call is refused."""

    def __init__(self, compute: Callable[[], Sequence[Sequence[int]]]) -> None:
        self._compute = functools.cache(compute)

    def __getitem__(self, row: Any) -> Any:
        return self._compute()[row]

    def __len__(self) -> int:
        return len(self._compute())


@dataclass(frozen=True)
class Watched(Scripted):
    """Counts the levels it drafts: a tree offers one true token a level, whatever its number of nodes."""

    levels: list[int] = field(default_factory=list)

    def start(self, target: PreTrainedModel, request: Request) -> ScriptedSession:
        self.seen.requests.append(request)
        return WatchedSession(self)


class WatchedSession(ScriptedSession):
    def propose(self, context: Context, limit: Limit) -> Draft:
        draft = super().propose(context, limit)
        assert isinstance(self.drafter, Watched)
        self.drafter.levels.append(int(draft.tree.depth.amax(1).sum()))
        return draft


@contextmanager
def passes(model: nn.Module) -> Iterator[list[None]]:
    """An entry for each forward pass that is made meanwhile."""
    made: list[None] = []
    handle = model.register_forward_pre_hook(lambda module, args: made.append(None))
    try:
        yield made
    finally:
        handle.remove()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Every attribute and buffer of every module, parameters and hooks left out."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        values |= dict(module.named_buffers(recurse=False))
        for key, value in values.items():
            found[path, key] = value.clone() if isinstance(value, Tensor) else value
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


class Family:
    """One family under test: a stock model, one of ours, and what the reference says.

    Args:
        name: in `FAMILIES`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stock, self.ours = families.build(name), sg.enable(families.build(name))
        self.decodes = "decoder_input_ids" if self.stock.config.is_encoder_decoder else "input_ids"
        self.row = Row(name, type(self.stock).__name__)
        self._said: dict[str, Any] = {}

    # --------------------------------------------------------------------------------------------- what is said

    def say(self, model: PreTrainedModel, given: Prompt | dict[str, Tensor], **kwargs: Any) -> Any:
        """A call of `generate`."""
        inputs = families.inputs(self.name, given) if isinstance(given, Prompt) else given
        settings = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
        return model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)

    def go_on(self, model: PreTrainedModel, first: Any, **kwargs: Any) -> Any:
        """The second turn of a conversation: everything said so far and something new, with the first turn's cache."""
        ids = torch.cat([first.sequences, torch.tensor(AGAIN.rows)], dim=1)
        seen = self.decodes == "input_ids"
        given = {"attention_mask": torch.ones_like(ids)} if seen else families.inputs(self.name, PAST)
        return self.say(model, {**given, self.decodes: ids}, cache=first.cache, **kwargs)

    def said(self, key: str, say: Callable[[], Any]) -> Any:
        """What the reference says, or raises; computed once."""
        if key not in self._said:
            try:
                self._said[key] = say()
            except Exception as error:
                self._said[key] = StockError(f"{type(error).__name__}: {first_line(error)}")
        if isinstance(self._said[key], StockError):
            raise self._said[key]
        return self._said[key]

    def by_stock(self, prompt: Prompt, **kwargs: Any) -> Any:
        return self.said(f"{prompt} {kwargs}", lambda: self.say(self.stock, prompt, **kwargs))

    def rows(self, prompt: Prompt, sequences: Tensor) -> list[list[int]]:
        """What `generate` returned, without padding."""
        mask = families.inputs(self.name, prompt).get("attention_mask") if self.decodes == "input_ids" else None
        if mask is None:
            return sequences.tolist()
        shown = nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1).bool()
        return [row[keep].tolist() for row, keep in zip(sequences, shown, strict=True)]

    # ------------------------------------------------------------------------------------------- one cell of the row

    def check(self, column: str, wanted: Callable[[], Any], got: Callable[..., Any], prompt: Prompt = PAST) -> None:
        """Fills one cell.

        Args:
            column: its name.
            wanted: what the reference says; raises StockError where it cannot.
            got: runs ours with the keyword arguments it is given.
            prompt: what the rows that are drafted begin with.
        """
        stats = sg.Stats()
        shape = "chain" if column in ("chain", "static cache") else "tree"
        script = Later(lambda: self.rows(prompt, wanted().sequences))
        drafter = Watched(script, shape, spoiled=SPOILED.get(column, 1 / 6))
        answer, raised = None, None
        with passes(self.ours) as made:
            try:
                answer = got(assistant=drafter, stats=stats)
            except Exception as error:
                raised = error
        try:
            reference = wanted()
        except StockError as error:
            self.set(column, STOCK, str(error))
            return
        if raised is None:
            self.compare(column, reference, answer, (drafter, stats))
        elif isinstance(raised, ValueError) and not made:
            self.set(column, REFUSED, first_line(raised))
        else:
            self.set(column, WRONG, f"{type(raised).__name__} after {len(made)} passes: {first_line(raised)}")

    def set(self, column: str, value: str, reason: str = "") -> None:
        self.row.cells[column] = value
        if reason:
            self.row.reasons[column] = reason

    def compare(self, column: str, wanted: Any, answer: Any, notes: tuple[Watched, sg.Stats]) -> None:
        """Tokens by equality, logits to rounding."""
        drafter, stats = notes
        if not torch.equal(wanted.sequences, answer.sequences):
            self.set(column, WRONG, "other tokens")
            return
        ours, theirs = torch.stack(answer.logits, 1), torch.stack(wanted.logits, 1)
        error = float((ours - theirs).abs().max() / theirs.std())
        if not error <= self.tolerance:
            self.set(column, WRONG, f"logits off by {error:.0e} standard deviations")
            return
        # Nothing is shown unless drafts were partly right; nor by a text that says the same again and again.
        told = f"{self.name}, {column}"
        assert 0.2 <= stats.accepted / sum(drafter.levels) <= 0.9, told
        assert drafter.seen.share("mixed") > 0.5, told
        assert min(len(set(row)) for row in wanted.sequences[:, -NEW:].tolist()) >= 6, f"{told}: the text loops"
        chains = drafter.shape == "tree" and all(drafter.seen.chains)
        self.set(column, CHAIN if chains else EXACT)

    @functools.cached_property
    def own(self) -> Probe:
        """Its own passes over several cached tokens against those over one."""
        return probe(self.stock, ours=False)

    @property
    def tolerance(self) -> float:
        """Of logits. Where a family's own passes differ at all in float64, something inside is float32."""
        if self.name in families.FLOAT32:
            return FLOAT32
        return TOLERANCE if self.own.error is None and max(self.own.block) < 1e-9 else ROUNDED

    # ----------------------------------------------------------------------------------------------- the columns

    def greedy(self, column: str, prompt: Prompt, **kwargs: Any) -> None:
        """Against stock."""
        self.check(
            column,
            lambda: self.by_stock(prompt, **kwargs),
            lambda **ours: self.say(self.ours, prompt, **kwargs, **ours),
            prompt,
        )

    def sampled(self, column: str) -> None:
        """Against nothing drafted, under the same seed."""
        kwargs = {"do_sample": True, "temperature": 1.3, "top_k": 30, "seed": 7}
        if self.row.cells["chain"] != EXACT:
            self.set(column, self.row.cells["chain"], self.row.reasons["chain"])
            return
        self.check(
            column,
            lambda: self.said(column, lambda: self.say(self.ours, PAST, assistant=sg.Plain(), **kwargs)),
            lambda **ours: self.say(self.ours, PAST, **kwargs, **ours),
        )
        if self.row.cells[column] == STOCK:  # which is ours here
            self.row.cells[column] = WRONG

    def continued(self, column: str) -> None:
        """Both turns are ours, against two of stock."""
        if self.row.cells["chain"] != EXACT:
            self.set(column, self.row.cells["chain"], self.row.reasons["chain"])
            return
        script = Later(lambda: self.rows(PAST, self.by_stock(PAST).sequences))
        first = self.say(self.ours, PAST, assistant=Watched(script, "tree"))
        self.check(
            column,
            lambda: self.said(column, lambda: self.go_on(self.stock, self.say(self.stock, PAST))),
            lambda **ours: self.go_on(self.ours, first, **ours),
        )

    def measure(self) -> Row:
        """The whole row."""
        before = state(self.stock)
        self.greedy("chain", PAST)
        after = state(self.stock)
        left = {f"{path}.{name}" for path, name in after if not same(before.get((path, name)), after[path, name])}
        self.row.state = ", ".join(sorted({f"`{re.sub(r'[.][0-9]+[.]', '.*.', name).lstrip('.')}`" for name in left}))
        self.greedy("tree", PAST)
        self.greedy("ragged batch", RAGGED)
        self.sampled("sampling")
        if families.has_window(self.stock.config):
            self.greedy("past the window", ACROSS)
        else:
            self.set("past the window", NONE)
        self.greedy("static cache", PAST, cache_implementation="static")
        self.continued("continued")
        if self.own.is_fault(self.own.block):
            self.row.own = f"{max(self.own.block):.0g}"
        elif self.row.cells["chain"] != EXACT:
            self.row.own = self.own.error or ""
        return self.row


# ---------------------------------------------------------------------------------------------------------- the page


def measured(name: str) -> Row:
    try:
        return Family(name).measure()
    except NotBuiltError as error:
        return Row(name, left_out=str(error))


@functools.cache
def page() -> dict[str, Row]:
    return support.read(PAGE.read_text(encoding="utf-8"))


def write(row: Row) -> None:
    """Puts a row into the page, and takes out families that are no more; other processes do the same."""
    import fcntl

    with PAGE.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {**support.read(file.read()), row.family: row}
        file.truncate(0)
        file.write(support.text({name: known for name, known in rows.items() if name in FAMILIES}))


@pytest.fixture
def hushed() -> Iterator[None]:
    """Some families warn of their own code, and transformers deprecates a way to call `generate` that Whisper uses."""
    logger = logging.getLogger("transformers.generation.utils")

    def of_others(record: logging.LogRecord) -> bool:
        return "Passing `generation_config` together" not in record.getMessage()

    logger.addFilter(of_others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.removeFilter(of_others)


SLOW = [pytest.param(name, marks=[] if name in NAMED else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.usefixtures("hushed")
def test_the_page_says_what_a_family_does(name):
    row = measured(name)
    wrong = {column: row.reasons[column] for column, value in row.cells.items() if value == WRONG}
    assert not wrong, f"{name} is neither exact nor refused: {wrong}"
    if os.environ.get("SUPPORT") == "write":
        write(row)
    elif support.version(PAGE.read_text(encoding="utf-8")) == transformers.__version__:
        assert row.comparable() == page()[name].comparable(), "`make support` writes the page anew"


def test_no_family_is_silently_wrong_and_most_are_exact():
    rows = page().values()
    assert not [row.family for row in rows if WRONG in row.cells.values()]
    three = ("chain", "tree", "ragged batch")
    assert sum(row.exact(*three) for row in rows) >= EXACT_FAMILIES
    assert sum(row.exact(*three, trees=False) for row in rows) >= WITH_CHAINS


def test_every_family_of_this_transformers_is_on_the_page():
    if support.version(PAGE.read_text(encoding="utf-8")) == transformers.__version__:
        assert sorted(page()) == sorted(FAMILIES)
    assert set(NAMED) <= set(page())


def test_the_named_families_are_exact_but_for_those_whose_refusal_says_why():
    rows = {name: page()[name] for name in NAMED}
    refused = {name: row.reasons["chain"] for name, row in rows.items() if row.cells["chain"] == REFUSED}
    assert refused.keys() == NAMED_REFUSALS.keys()
    for name, words in NAMED_REFUSALS.items():
        assert words in refused[name]
    for name in NAMED_REFUSALS.keys() ^ rows.keys():
        assert rows[name].exact("chain", "tree", "ragged batch", "sampling", trees=False), name


# ------------------------------------------------------------------------------------------------------- mutants


def nothing_is_cropped(patch):
    commit = CropCache.commit

    def whole(self, paths):
        commit(self, [None if path is None else range(1, self.width) for path in paths])

    patch.setattr(CropCache, "commit", whole)


# By the column whose calls must notice them. What is peculiar to recurrent layers is in test_recurrent.py.
MUTANTS = {
    "chain": [nothing_is_cropped],
    "tree": [a_node_sees_every_node_before_it, positions_are_node_indices],
    "past the window": [the_window_is_ignored],
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.usefixtures("hushed")
def test_a_wrong_mask_or_position_or_roll_back_is_caught_on_every_named_family(name, monkeypatch):
    known, family = page()[name], Family(name)
    cropped = str(sg.check(family.ours).cache).startswith("CropCache")
    for column, mutants in MUTANTS.items():
        if known.cells[column] != EXACT or (column == "chain" and not cropped):
            continue
        prompt = ACROSS if column == "past the window" else PAST
        for mutant in mutants:
            family.by_stock(prompt)  # from the package as it is
            with monkeypatch.context() as patch:
                mutant(patch)
                family.greedy(column, prompt)
            assert family.row.cells[column] == WRONG, mutant.__name__
