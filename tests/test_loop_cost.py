"""What a round costs beside its passes: one target forward whatever the batch, one read from the device.

How reads are counted. A read is whatever makes the host wait for the device: a tensor's value becoming a Python object,
or a shape that depends on values. Everything runs on the CPU here, where reading is free, so calls are counted and not
waiting. `Reads` is a function mode and a dispatch mode at once, and each sees what the other cannot:

- The function mode sees every method and function that Python calls on a tensor: `item`, `tolist`, `numpy`, `cpu`, and
  what the interpreter calls by itself in `if tensor`, `range(tensor)` and `float(tensor)`. `tolist` reads memory and
  dispatches no operation, so that no other mode sees it.
- The dispatch mode sees operations that torch's own functions call, and those whose result has a shape that depends on
  values, such as an index by a mask. Within a call that the function mode has counted, nothing is counted again.

A forward of a model is left out: what happens in there, happens in plain decoding as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from tiny import ONE, RAGGED, AlwaysWrong, Prompt, Scripted
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Request
from hf_specgen.sampling import Noise

NEW = 32
FOUR = Prompt((*RAGGED.rows, *ONE.rows))
PROMPTS = {"one": ONE, "four": FOUR}

# What Python calls: a Python object comes of these.
CALLS = {
    *("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__dlpack__"),
    *("__contains__", "__repr__", "__format__"),
}
# What torch calls: a Python object, or a shape that depends on values.
OPERATIONS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"),
}


# An assistant, and the models that it runs.
Made = tuple[Any, tuple[PreTrainedModel, ...]]


class _Operations(TorchDispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATIONS or _by_mask(name, args):
            self.reads.note(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts reads while it is entered; see the top of this file.

    Attributes:
        counted: how often each call read.
        paused: more than 0 while nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.paused = 0
        self._operations = _Operations(self)

    @property
    def total(self) -> int:
        return self.counted.total()

    def note(self, name: str) -> None:
        if not self.paused:
            self.counted[name] += 1

    def __enter__(self) -> Reads:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._operations.__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in CALLS and not _to_host(name, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self.note(name)
        with self.pause():
            return func(*args, **(kwargs or {}))

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def leave_out(self, model: torch.nn.Module) -> None:
        """Counts nothing within this model's forward."""
        forward = model.forward

        def paused(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                return forward(*args, **kwargs)

        # Keeps the signature, which transformers reads.
        paused.__wrapped__ = forward  # type: ignore[attr-defined]
        model.forward = paused  # type: ignore[method-assign]


def _to_host(name: str, args: Any, kwargs: Any) -> bool:
    """Whether it is a `to` that names the host. A device object may be the target's own, which is the CPU only here."""
    return name == "to" and any(isinstance(place, str) and place == "cpu" for place in (*args[1:], *kwargs.values()))


def _by_mask(name: str, args: Any) -> bool:
    """Whether it is an indexing whose result has a shape that depends on a mask."""
    masks = (torch.bool, torch.uint8)
    return "index" in name and any(
        isinstance(index, torch.Tensor) and index.dtype in masks
        for arg in args
        if isinstance(arg, list | tuple)
        for index in arg
    )


@dataclass
class Counted:
    """What was counted after the prompts' passes: the target's own, and a draft model's in the first round.

    Attributes:
        total: by kind of read.
        rounds: in each round.
        drafted: tokens drafted in these rounds.
        accepted: those of them that were kept.
    """

    total: Counter[str]
    rounds: list[int]
    drafted: int = 0
    accepted: int = 0


def count(prompt: Prompt, made: Made, **kwargs: Any) -> Counted:
    """Counts in a call of `stream`.

    Args:
        prompt: rows.
        made: an assistant, and the models that it runs.
        **kwargs: of `generate`.
    """
    model, reads = sg.enable(tiny.llama()), Reads()
    assistant, others = made
    for each in model, *others:
        reads.leave_out(each)
    steps = sg.stream(model, **prompt.inputs(), assistant=assistant, max_new_tokens=NEW, **kwargs)
    next(steps), next(steps)
    counted = Counted(reads.counted, [])
    with reads:
        before = 0
        for step in steps:
            counted.rounds.append(reads.total - before)
            before = reads.total
            counted.drafted += sum(step.drafted)
            counted.accepted += sum(step.accepted)
    return counted


# ------------------------------------------------------------------------------------------------ the count can fail


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "bool": lambda tensor: bool(tensor[0]),
    "if": lambda tensor: 1 if tensor[0] else 2,
    "int": lambda tensor: int(tensor[0]),
    "float": lambda tensor: float(tensor[0]),
    "range": lambda tensor: range(tensor[0]),
    "index": lambda tensor: [0, 1, 2, 3][tensor[0]],
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu"),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 1],
    "assign-by-mask": lambda tensor: tensor.__setitem__(tensor > 1, torch.tensor([5, 6])),
    "where": lambda tensor: torch.where(tensor > 1),
    "unique": lambda tensor: tensor.unique(),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "in": lambda tensor: 2 in tensor,
    "slice": lambda tensor: tensor[1 : tensor[2]],
    "bincount": lambda tensor: torch.bincount(tensor),
    "repeat": lambda tensor: tensor.repeat_interleave(tensor),
    "format": lambda tensor: f"{tensor[0]}",
    "max": lambda tensor: max(tensor[0], tensor[1]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_kind_of_read_is_counted_once(read):
    tensor = torch.tensor([1, 2, 3])
    with Reads() as reads:
        read(tensor)
    assert reads.total == 1, reads.counted


WORK: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda tensor: tensor.argmax(-1),
    "gather": lambda tensor: tensor.gather(0, tensor.clamp(max=2)),
    "index": lambda tensor: tensor[tensor.clamp(max=2)],
    "shape": lambda tensor: [len(tensor), tensor.shape, tensor.numel(), tensor.device],
    "where": lambda tensor: torch.where(tensor > 1, tensor, 0),
    "masked_fill": lambda tensor: tensor.masked_fill(tensor > 1, 0),
    "cat": lambda tensor: torch.cat([tensor, torch.tensor([1])]),
    "iter": lambda tensor: list(tensor),
    "dtype": lambda tensor: tensor.to(torch.float32).float().long(),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_what_reads_nothing_is_not_counted(work):
    tensor = torch.tensor([1, 2, 3])
    with Reads() as reads:
        work(tensor)
    assert reads.counted == {}


@dataclass(frozen=True)
class Prying:
    """A drafter around another one that looks at its draft, once a round or once a token."""

    inner: Any
    each_token: bool
    num_assistant_tokens: int = 5

    def start(self, target: PreTrainedModel, request: Request) -> Any:
        session = self.inner.start(target, request)
        propose = session.propose

        def pry(context: Context, limit: Limit) -> Draft:
            draft = propose(context, limit)
            for token in draft.tokens[0] if self.each_token else draft.tokens[0, :1]:
                token.item()
            return draft

        session.propose = pry
        return session


@pytest.mark.parametrize("each_token", [False, True])
def test_a_drafter_that_reads_is_noticed(each_token):
    known = tiny.truth_of(sg.enable(tiny.llama()), ONE, "greedy", NEW + 10)
    counted = count(ONE, (Prying(Scripted(known), each_token), ()))
    asked = sum(reads > 1 for reads in counted.rounds)
    assert asked >= len(counted.rounds) - 1, "in the last round there may be room for the target's token only"
    assert counted.total == {"tolist": len(counted.rounds), "item": counted.drafted if each_token else asked}


# -------------------------------------------------------------------------------------------------------- the counts


def lookup(known: Any) -> Made:
    return sg.PromptLookup(min_ngram=1, store=None if known is None else tiny.store_of(known)), ()


def draft_model(known: Any) -> Made:
    drafter = tiny.sibling(tiny.llama(), noise=0.1)
    return sg.DraftModel(drafter), (drafter,)


CHAINS: dict[str, Callable[[Any], Made]] = {
    "plain": lambda known: (sg.Plain(), ()),
    "lookup": lookup,
    "draft-model": draft_model,
    "scripted": lambda known: (Scripted(known), ()),
    "scripted-tree": lambda known: (Scripted(known, "tree"), ()),
    "wrong": lambda known: (AlwaysWrong(known), ()),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("rows", PROMPTS)
def test_a_greedy_round_reads_once_and_never_for_a_drafted_token(name, rows):
    known = tiny.truth_of(sg.enable(tiny.llama()), PROMPTS[rows], "greedy", NEW + 10)
    counted = count(PROMPTS[rows], CHAINS[name](known), do_sample=False)
    assert set(counted.rounds) == {1}
    assert counted.total == {"tolist": len(counted.rounds)}
    # The drafts were there, and right in part.
    assert counted.drafted >= 2 * len(counted.rounds) or name == "plain"
    assert counted.accepted > 0 or name in ("plain", "wrong")


@pytest.mark.parametrize("rule", ["matching", "rejection", "block"])
@pytest.mark.parametrize("name", ["plain", "lookup", "draft-model"])
@pytest.mark.parametrize("rows", PROMPTS)
def test_a_sampled_round_reads_once(rule, name, rows, monkeypatch):
    # On a CPU, where reading is free, `argmax` counts finite scores to save hashing. This is what it does elsewhere
    # (`test_sampling.py` shows it to be the same choice, and to read nothing on a device).
    monkeypatch.setattr(Noise, "argmax", lambda noise, scores: noise.perturb(scores).argmax(-1))
    counted = count(PROMPTS[rows], CHAINS[name](None), do_sample=True, top_k=20, seed=3, acceptance=rule)
    assert set(counted.rounds) == {1}
    assert counted.total == {"tolist": len(counted.rounds)}


# ------------------------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("mode", ["greedy", "sampled", "hash-sampled"])
@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("cache", ["slot", "static"])
def test_a_round_is_one_forward_of_the_target_whatever_the_batch(name, mode, rows, cache):
    model, prompt = sg.enable(tiny.llama()), PROMPTS[rows]
    assistant, _ = CHAINS[name](tiny.truth_of(model, prompt, mode, NEW + 10))
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    stats, kwargs = sg.Stats(), tiny.CACHES[cache](model, prompt.columns + NEW)
    tiny.run(model, prompt, mode, assistant=assistant, max_new_tokens=NEW, stats=stats, **kwargs)
    assert len(shapes) == 1 + stats.rounds
    assert {batch for batch, _ in shapes} == {prompt.batch}
    if name == "plain":
        assert stats.rounds == NEW - 1
        assert {width for _, width in shapes[1:]} == {1}
    else:
        assert max(width for _, width in shapes[1:]) > 4
    if name.startswith("scripted"):
        assert stats.rounds < NEW - 1


@pytest.mark.parametrize("rows", PROMPTS)
def test_a_draft_model_makes_one_pass_a_level_whatever_the_batch(rows):
    model, drafter, passes, stats = sg.enable(tiny.llama()), tiny.sibling(tiny.llama()), [], sg.Stats()
    drafter.register_forward_pre_hook(lambda module, args: passes.append(1))
    for branches in 1, 3:
        passes.clear()
        stats = sg.Stats()
        assistant = sg.DraftModel(drafter, branches=branches, num_assistant_tokens=4)
        tiny.run(model, PROMPTS[rows], assistant=assistant, max_new_tokens=NEW, stats=stats)
        assert 0 < len(passes) <= 4 * stats.rounds


# --------------------------------------------------------------------------------------------------------- on a device


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["plain", "lookup", "draft-model"])
@pytest.mark.parametrize("rows", PROMPTS)
def test_on_a_gpu_a_round_copies_to_the_host_once(name, rows):
    # Here the copies themselves are counted, those within the forwards too.
    model = sg.enable(tiny.llama()).cuda()
    assistant, models = CHAINS[name](None)
    for each in models:
        each.cuda()
    inputs = {key: value.cuda() for key, value in PROMPTS[rows].inputs().items()}
    steps = sg.stream(model, **inputs, assistant=assistant, do_sample=False, max_new_tokens=NEW)
    next(steps), next(steps)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        rounds = sum(1 for _ in steps)
        torch.cuda.synchronize()
    copies = sum(event.count for event in profile.key_averages() if event.key.startswith("Memcpy DtoH"))
    assert copies == rounds
