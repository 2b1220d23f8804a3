"""Several processes: who decodes one text agrees on it, who gathers weights waits for the others, the rest go alone.

Every test runs `gloo` processes on the CPU, which meet in a file. One that hangs is ended, and fails.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from tiny import ONE, RAGGED, Prompt, Scripted
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.distributed import DistributedConfig

import hf_specgen as sg
from hf_specgen import generation, ranks
from hf_specgen.sampling import fresh_seed

NEW = 16
# Long beside the second or two that a job takes, short beside a runner's patience.
PATIENCE = 120

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


# ------------------------------------------------------------------------------------------------------- the processes


def _serve(job: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, meeting: str, answer: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), CUDA_VISIBLE_DEVICES="")
    try:
        dist.init_process_group("gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world)
        answer.send((job(rank, *args), None))
    except BaseException:
        answer.send((None, traceback.format_exc()))
    os._exit(0)  # a peer that died must not keep this one in its farewell


def run(job: Callable[..., Any], *args: Any, folder: Path, world: int = 2) -> list[Any]:
    """What `job(rank, *args)` gave on each rank."""
    context = multiprocessing.get_context("forkserver")
    meeting = str(folder / f"meeting-{random.randrange(1 << 60)}")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_serve, args=(job, args, rank, world, meeting, pipes[rank][1])) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    answers: dict[int, Any] = {}
    until = time.monotonic() + PATIENCE
    try:
        while len(answers) < world and (left := until - time.monotonic()) > 0:
            waiting = {pipes[rank][0]: rank for rank in range(world) if rank not in answers}
            for end in wait(list(waiting), timeout=left):
                result, error = end.recv()
                # The others may wait for this rank for ever.
                assert error is None, f"rank {waiting[end]} of {job.__name__}:\n{error}"
                answers[waiting[end]] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(answers) == world, f"{job.__name__} hangs: only ranks {sorted(answers)} came back"
    return [answers[rank] for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes meet, and the tiny Llama's checkpoint, which tensor parallelism loads from."""
    return tiny.checkpoints(tmp_path_factory.mktemp("ranks"))


@functools.cache
def truth(prompt: Prompt, mode: str = "greedy") -> tuple[tuple[int, ...], ...]:
    return tiny.truth_of(sg.enable(tiny.llama()), prompt, mode, NEW + 16)


def split(folder: Path, name: str = "llama", **sizes: int) -> PreTrainedModel:
    """A checkpoint under transformers' own plan of tensor parallelism."""
    sizes = sizes or {"tp_size": dist.get_world_size()}
    config = DistributedConfig(**sizes)
    return LlamaForCausalLM.from_pretrained(folder / name, distributed_config=config, dtype=torch.float64)


@dataclass(frozen=True)
class Told:
    """How a rank's call went: the texts, counts for each round and row, and the tokens and parents of each draft."""

    texts: tuple[tuple[int, ...], ...]
    accepted: list[list[int]]
    drafted: list[list[int]]
    drafts: list[tuple[list[list[int]], list[list[int]]]]

    @property
    def mixed(self) -> bool:
        """Most rounds accepted something, and something was rejected."""
        pairs = [(a, d) for step in zip(self.accepted, self.drafted, strict=True) for a, d in zip(*step, strict=True)]
        return 0 < sum(a for a, _ in pairs) < sum(d for _, d in pairs)


def told(model: PreTrainedModel, prompt: Prompt, mode: str = "greedy", **kwargs: Any) -> Told:
    arguments = {**prompt.inputs(), **tiny.MODES[mode](), "max_new_tokens": NEW, **kwargs}
    drafts: list[Any] = []
    agree = ranks.Ranks.agree_on_draft

    def noted(self: ranks.Ranks, draft: sg.Draft) -> sg.Draft:
        draft = agree(self, draft)
        drafts.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks.Ranks, "agree_on_draft", noted)
        steps = list(sg.stream(model, **arguments))
    rows = zip(prompt.rows, zip(*(step.tokens for step in steps), strict=True), strict=True)
    texts = tuple((*ids, *(token for tokens in gained for token in tokens)) for ids, gained in rows)
    return Told(texts, [step.accepted for step in steps], [step.drafted for step in steps], drafts)


def drafter(name: str, folder: Path, known: tuple[tuple[int, ...], ...]) -> Any:
    if name == "scripted-chain":
        return Scripted(known)
    if name == "scripted-tree":
        return Scripted(known, "tree")
    small = sg.enable(split(folder, "sibling")) if "split" in name else tiny.sibling(tiny.llama())
    return sg.DraftModel(small, branches=3 if "tree" in name else 1, num_assistant_tokens=5)


def shortened(texts: tuple[tuple[int, ...], ...], prompt: Prompt, new: int = NEW) -> tuple[tuple[int, ...], ...]:
    return tuple(text[: len(ids) + new] for text, ids in zip(texts, prompt.rows, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """The process that all others are forked from knows this file; older Pythons do not tell it where files are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.set_forkserver_preload(["test_ranks"])
        forkserver.ensure_running()


# ----------------------------------------------------------------------------------------------------- tensor parallel


DRAFTERS = ["scripted-chain", "scripted-tree", "model-chain", "split-chain", "split-tree"]


def _without_a_seed(rank: int, folder: Path, known: Any) -> list[Told]:
    model = sg.enable(split(folder))
    assert model.tp_size == 2
    answers = []
    for name in DRAFTERS:
        for mode, prompt in ("sampled", ONE), ("penalties-sampled", RAGGED):
            torch.manual_seed(rank)
            answers.append(told(model, prompt, mode, assistant=drafter(name, folder, known[prompt, mode])))
    return answers


def test_report_49_ranks_that_sample_without_a_seed_accept_the_same(folder):
    # Rank 0's seed, which the scripted drafters are to know the text of.
    torch.manual_seed(0)
    seed = fresh_seed()
    model = sg.enable(tiny.llama())
    cells = [(ONE, "sampled"), (RAGGED, "penalties-sampled")]
    kwargs = {"assistant": sg.Plain(), "seed": seed, "max_new_tokens": NEW + 16}
    known = {(prompt, mode): tiny.run(model, prompt, mode, **kwargs) for prompt, mode in cells}
    first, second = run(_without_a_seed, folder, known, folder=folder)
    assert first == second
    assert all(told.mixed for told in first)
    for told, (prompt, mode) in zip(first, len(DRAFTERS) * cells, strict=True):
        assert told.texts == shortened(known[prompt, mode], prompt)


def _crooked(rank: int, folder: Path, known: Any, cells: Any, whole: bool = False) -> list[Told]:
    """The second rank's logits are noise, and those of its drafter too."""
    model = sg.enable(tiny.llama() if whole else split(folder))
    answers = []
    for name, (prompt, mode, kwargs) in cells:
        assistant = drafter(name.replace("split", "model") if whole else name, folder, known[prompt, mode])
        models = [model, assistant.model] if isinstance(assistant, sg.DraftModel) else [model]
        for one in models if rank else []:
            one.register_forward_hook(_noise)
        if kwargs.get("cache_implementation") == "static":
            kwargs = {**kwargs, "max_length": prompt.columns + NEW, "max_new_tokens": None}
        answers.append(told(model, prompt, mode, assistant=assistant, **kwargs))
    return answers


def _noise(module: Any, inputs: Any, outputs: Any) -> None:
    outputs.logits += 100 * torch.randn_like(outputs.logits)


CROOKED = [
    (ONE, "greedy", {}),
    (RAGGED, "greedy", {"cache_implementation": "static"}),
    (RAGGED, "sampled", {}),
    (RAGGED, "hash-greedy", {}),  # in lockstep
    (ONE, "penalties-greedy", {}),
    (RAGGED, "sampled", {"acceptance": "rejection"}),
    (RAGGED, "penalties-sampled", {"acceptance": "rejection"}),
    (ONE, "sampled", {"acceptance": "block"}),
]


def test_the_first_rank_decides_whatever_the_others_come_to(folder):
    cells = [("scripted-tree", cell) for cell in CROOKED]
    cells += [(name, (RAGGED, "greedy", {}) if name.startswith("split") else CROOKED[3]) for name in DRAFTERS]
    cells = [(name, (*cell[:2], {**cell[2], "seed": 7 if "sampled" in cell[1] else None})) for name, cell in cells]
    known = {(prompt, mode): truth(prompt, mode) for prompt, mode, _ in CROOKED}
    first, second = run(_crooked, folder, known, cells, folder=folder)
    assert first == second
    assert first == _crooked(0, folder, known, cells, whole=True), "one process decodes the same in the same rounds"
    for told, (_, (prompt, mode, kwargs)) in zip(first, cells, strict=True):
        assert told.mixed
        assert "acceptance" in kwargs or told.texts == shortened(known[prompt, mode], prompt)


class Late(StoppingCriteria):
    """A stop that only one rank sees, after some tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.tokens)


class Moody:
    """A draft length that follows a clock, which differs from rank to rank."""

    def __init__(self) -> None:
        self.chance = random.Random(dist.get_rank())

    def start(self, situation: Any) -> Moody:
        return self

    def depth(self, most: int) -> int:
        return self.chance.randrange(6)

    def nodes(self) -> int:
        return 64

    def choose(self, draft: sg.Draft) -> sg.Draft:
        return draft

    def update(self, step: sg.Step) -> None:
        pass


def _clocks(rank: int, folder: Path, known: Any) -> list[Told]:
    model, answers = sg.enable(split(folder)), []
    for times in (0.0, 1e6), (1e6, 0.0):
        for mode in "greedy", "penalties-greedy":
            kwargs = {"assistant": Scripted(known[mode]), "max_time": times[rank]}
            answers.append(told(model, ONE, mode, **kwargs))
    for ends in (20, 1000), (1000, 20):
        criteria = StoppingCriteriaList([Late(ends[rank])])
        answers.append(told(model, ONE, assistant=Scripted(known["greedy"]), stopping_criteria=criteria))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generation, "as_length", lambda asked: Moody())
        names = ["scripted-chain", "split-chain"]
        answers += [told(model, ONE, assistant=drafter(name, folder, known["greedy"])) for name in names]
    return answers


def test_clocks_criteria_and_draft_lengths_are_the_first_rank_s(folder):
    known = {mode: truth(ONE, mode) for mode in ("greedy", "penalties-greedy")}
    first, second = run(_clocks, folder, known, folder=folder)
    assert first == second
    lengths = [len(told.texts[0]) - ONE.columns for told in first]
    assert lengths == [1, 1, NEW, NEW, 6, NEW, NEW, NEW]
    assert first[-1].texts == first[-2].texts == shortened(known["greedy"], ONE)


def _refused(rank: int, folder: Path) -> list[str]:
    model, answers = sg.enable(split(folder)), []
    whole = sg.enable(tiny.llama())
    gathered = fully_sharded(tiny.llama())
    stages = sg.enable(split(folder, pp_size=2))
    states = fully_sharded(Lfm2ForCausalLM(Lfm2Config(**tiny._sizes(layer_types=["conv"] * 2))))
    for target, kwargs in [
        (states, {"assistant": sg.Plain()}),
        (model, {"assistant": gathered}),
        (whole, {"assistant": model}),
        (gathered, {"assistant": sg.Plain(), "prefill_chunk_size": 4}),
        (stages, {"assistant": sg.Plain()}),
    ]:
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the messages are compared by the other process)
            told(sg.enable(target), ONE, **kwargs)
        answers.append(str(error.value))
    return answers


def test_what_would_hang_is_refused(folder):
    first, second = run(_refused, folder, folder=folder)
    assert first == second
    wanted = ["recurrent", "FSDP", "split over ranks", "prefill_chunk_size", "pipeline"]
    for message, words in zip(first, wanted, strict=True):
        assert words in message


# ------------------------------------------------------------------------------------------------------- fully sharded


def fully_sharded(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


# Unequal in rows, in lengths and in how many tokens they are to gain.
PROMPTS = (RAGGED, ONE)
LENGTHS = (7, 16)


def _sharded(rank: int, known: Any) -> list[Any]:
    prompt, new, texts = PROMPTS[rank], LENGTHS[rank], known[rank]
    answers: list[Any] = []
    for wrap in (lambda model: sg.enable(fully_sharded(model)), lambda model: fully_sharded(sg.enable(model))):
        model = wrap(tiny.llama())
        assistants = [sg.Plain(), Scripted(texts), Scripted(texts, "tree"), tiny.sibling(tiny.llama())]
        answers += [told(model, prompt, assistant=one, max_new_tokens=new).texts for one in assistants]
        kwargs = {"assistant": Scripted(texts), "cache_implementation": "static"}
        answers.append(tiny.run(model, prompt, max_new_tokens=new, **kwargs))
    return answers


def test_each_rank_goes_on_until_all_have_finished(folder):
    known = [truth(prompt) for prompt in PROMPTS]
    for rank, answers in enumerate(run(_sharded, known, folder=folder)):
        wanted = shortened(known[rank], PROMPTS[rank], LENGTHS[rank])
        assert answers == [wanted] * len(answers)


def test_disabling_does_not_take_the_shards_away():
    model = sg.enable(tiny.llama())
    model.__class__ = type("FSDPLlamaForCausalLM", (type(model),), {})  # as fully_shard does
    with pytest.raises(ValueError, match="FSDPLlamaForCausalLM was put over"):
        sg.disable(model)
    assert type(model).__name__ == "FSDPLlamaForCausalLM"


def _returned(rank: int, eos: int, sharded: bool = True) -> list[Any]:
    """Rows of the first rank end apart, so that only there the cache is fed once more at the end."""
    model = sg.enable(fully_sharded(tiny.llama()) if sharded else tiny.llama())
    kwargs = {"return_dict_in_generate": True, "max_new_tokens": NEW, "eos_token_id": eos, "assistant": sg.Plain()}
    passes = Passes(model)
    for _ in range(2):  # the second call would not come together if the first had left a rank behind
        answer = model.generate(**PROMPTS[rank].inputs(), **kwargs)
    keys = [layer.keys.sum().item() for layer in answer.cache.layers]
    return [answer.sequences.tolist(), keys, passes.count]


def test_so_do_the_caches_that_are_returned(folder):
    text = truth(RAGGED)[0]
    eos = text[len(RAGGED.rows[0]) + 5]
    alone = [_returned(rank, eos, sharded=False) for rank in (0, 1)]
    assert alone[0][2] > alone[1][2], "one pass more, and no token of it"
    for (ids, keys, passes), (wanted, sums, _) in zip(run(_returned, eos, folder=folder), alone, strict=True):
        assert ids == wanted
        assert keys == pytest.approx(sums)
        assert passes == alone[0][2]


class Passes:
    """Counts the forwards of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._add)

    def _add(self, *args: Any) -> None:
        self.count += 1


def _told_to(rank: int, how: str) -> tuple[int, bool]:
    """How many passes a whole model makes, and whether its rank talks, if the caller or DeepSpeed says that it must."""
    model = tiny.llama() if how == "bound" else sg.enable(tiny.llama())
    passes, talks = Passes(model), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal talks
        talks += 1
        return all_reduce(*args, **kwargs)

    all_reduce = dist.all_reduce
    kwargs = {**PROMPTS[rank].inputs(), "max_new_tokens": LENGTHS[rank], "assistant": sg.Plain(), "do_sample": False}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counted)
        patched.setattr(dist, "broadcast", _must_not_talk)
        patched.setattr(ranks, "is_deepspeed_zero3_enabled", lambda: how.startswith("zero"))
        if how == "bound":
            model.generate(**kwargs, custom_generate=functools.partial(sg.speculate, synced_gpus=True))
        elif how == "streamed":
            list(sg.stream(model, **kwargs, synced_gpus=True))
        else:
            synced = {"asked": {"synced_gpus": True}, "zero, but asked not to": {"synced_gpus": False}}
            model.generate(**kwargs, **synced.get(how, {}))
    return passes.count, talks > 0


def _must_not_talk(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("nothing here concerns another process")


@pytest.mark.parametrize("how", ["zero", "asked", "streamed", "bound"])
def test_zero_and_synced_gpus_make_ranks_wait(how, folder):
    assert run(_told_to, how, folder=folder) == [(max(LENGTHS), True)] * 2


@pytest.mark.parametrize("how", ["beside one another", "zero, but asked not to"])
def test_ranks_beside_one_another_do_not_wait(how, folder):
    assert run(_told_to, how, folder=folder) == [(LENGTHS[0], False), (LENGTHS[1], False)]


# ---------------------------------------------------------------------------------------------------- a part of a world


def _both(rank: int, folder: Path, known: Any) -> Told:
    model = sg.enable(split(folder, tp_size=2, fsdp_size=2))
    prompt = PROMPTS[rank // 2]
    if rank % 2:
        model.register_forward_hook(_noise)
    return told(model, prompt, assistant=Scripted(known[rank // 2], "tree"), max_new_tokens=LENGTHS[rank // 2])


def _by_hand(rank: int, folder: Path, known: Any) -> Told:
    """Two copies of a model that torch alone has split over two ranks each; the copies know nothing of one another."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "slice"))
    model = tiny.llama()
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh["slice"], {**plan, "self_attn.o_proj": RowwiseParallel()})
    if rank % 2:
        model.register_forward_hook(_noise)
    prompt = PROMPTS[rank // 2]
    kwargs = {"assistant": Scripted(known[rank // 2], "tree"), "max_new_tokens": LENGTHS[rank // 2]}
    return told(sg.enable(model), prompt, **kwargs)


@pytest.mark.parametrize("job", [_both, _by_hand])
def test_each_group_within_a_world_decides_for_itself(job, folder):
    known = [truth(prompt) for prompt in PROMPTS]
    answers = run(job, folder, known, folder=folder, world=4)
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for answer, texts, prompt, new in zip(answers[::2], known, PROMPTS, LENGTHS, strict=True):
        assert answer.texts == shortened(texts, prompt, new)
        assert answer.mixed


# ----------------------------------------------------------------------------------------------------------- by oneself


def _alone(rank: int) -> tuple[tuple[int, ...], ...]:
    with pytest.MonkeyPatch.context() as patched:
        for name in "broadcast", "all_reduce", "broadcast_object_list", "all_gather", "barrier":
            patched.setattr(dist, name, _must_not_talk)
        kwargs = {"assistant": tiny.sibling(tiny.llama()), "max_new_tokens": NEW}
        return tiny.run(sg.enable(tiny.llama()), ONE, "sampled", **kwargs)


@pytest.mark.parametrize("where", ["without a group", "in a group of one"])
def test_a_single_process_talks_to_nobody(where, folder):
    answer = _alone(0) if where == "without a group" else run(_alone, folder=folder, world=1)[0]
    assert answer == shortened(truth(ONE, "sampled"), ONE)
    assert ranks.Ranks.of(tiny.llama(), torch.device("cpu")).agree(given := torch.ones(1)) is given
