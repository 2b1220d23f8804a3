"""How scores become choices: logits processors over many nodes, and noise that is a function of the place it is for.

Sampling is `argmax(scores + G)` with Gumbel noise G, which draws from `softmax(scores)`. G is hashed from (seed, row,
position, token), so that what is sampled at a place does not depend on when, how often or in what company it is asked
for: a speculative run and a plain one read the same noise.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

# SplitMix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers: torch's int64 multiplication wraps.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)

# Elements hashed at once. On a CPU the working set should stay in the cache, elsewhere launches should be few.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 22

# With fewer finite scores than one in this many, only those are hashed.
_SPARSE = 4


def _mix(counter: Tensor) -> Tensor:
    """SplitMix64's output function, in place; the counters have to be `_STEP` apart."""
    shifted = torch.empty_like(counter)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # torch shifts the sign in from the left; the mask makes the shift logical.
        torch.bitwise_right_shift(counter, shift, out=shifted)
        counter.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            counter.mul_(factor)
    return counter


def _uniform(bits: Tensor) -> Tensor:
    """float64 in (0, 1) from the top 53 bits, in place; the lowest of them is set, which keeps 0 and 1 out."""
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).bitwise_or_(1)
    return bits.to(torch.float64).mul_(2.0**-53)


def _gumbel(state: Tensor, counter: Tensor) -> Tensor:
    """Gumbel noise for `state + counter`, which broadcast."""
    return _uniform(_mix(state + counter)).log_().neg_().log_().neg_()


def _fold(seed: int) -> int:
    """Any integer as a signed 64-bit key; different integers get different keys but for one chance in 2**64."""
    size = seed.bit_length() // 8 + 1
    digest = hashlib.blake2b(seed.to_bytes(size, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


_STREAMS = {name: _fold(number) for number, name in enumerate(("draft", "accept", "residual"))}


def _check_float64(device: torch.device | str) -> None:
    if torch.device(device).type == "mps":
        raise ValueError("Sampling needs float64, which mps does not have: decode greedily or on another device.")


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise keyed by (seed, row, position, token): equal questions get equal answers.

    The object holds keys only; nothing is drawn, and no generator is read or advanced. A noise without a stream is the
    target's own. The hash is the same on every device, the Gumbel noise made of it up to the last bits of a logarithm.
    float64 is needed, which mps does not have.

    Attributes:
        keys: `(batch,)` int64, one a row.
        positions: `(batch, n)` int64, where `at` has bound it.
        root: `(batch,)` int64, the position of the first token that the round decides.
    """

    keys: Tensor
    positions: Tensor | None = None
    root: Tensor | None = None

    @classmethod
    def of(cls, seeds: int | Sequence[int], rows: int, device: torch.device | str) -> Noise:
        """The target's noise of a call.

        Args:
            seeds: one integer of any size and sign for all rows, which then differ, or one integer a row: a row reads
                what row 0 reads under its integer alone.
            rows: output rows.
            device: where scores will be.

        Raises:
            ValueError: if `seeds` has not one integer a row, or the device has no float64.
        """
        _check_float64(device)
        if isinstance(seeds, Sequence):
            if len(seeds) != rows:
                raise ValueError(f"seed holds {len(seeds)} integers for {rows} rows: give one integer, or one a row.")
            keys = torch.tensor([_fold(operator.index(seed)) for seed in seeds], dtype=torch.long)
            place = torch.zeros(rows, dtype=torch.long)
        else:
            keys = torch.full((rows,), _fold(operator.index(seeds)), dtype=torch.long)
            place = torch.arange(rows)
        return cls(_mix(keys + (place + 1) * _STEP).to(device))

    def at(self, positions: Tensor, root: Tensor | None = None) -> Noise:
        """This noise at the places of tokens that are to be chosen.

        Args:
            positions: `(batch, n)` int64, each token's index in its row, padding not counted.
            root: `(batch,)` int64, see the class; the first column of `positions` unless given.
        """
        return replace(self, positions=positions, root=positions[:, 0] if root is None else root)

    def rows(self, indices: Sequence[int]) -> Noise:
        """This noise for the rows in `indices` alone."""
        chosen = list(indices)
        positions = None if self.positions is None else self.positions[chosen]
        root = None if self.root is None else self.root[chosen]
        return replace(self, keys=self.keys[chosen], positions=positions, root=root)

    def to(self, device: torch.device | str) -> Noise:
        """The same noise on `device`; raises ValueError where there is no float64."""
        _check_float64(device)
        positions = None if self.positions is None else self.positions.to(device)
        root = None if self.root is None else self.root.to(device)
        return replace(self, keys=self.keys.to(device), positions=positions, root=root)

    def node(self, index: Tensor) -> Noise:
        """Bound noise at one of its nodes a row.

        Args:
            index: `(batch,)` int64, a column of `positions`.
        """
        return replace(self, positions=self._bound().gather(1, index.unsqueeze(1)))

    def where(self, rows: Tensor, other: Noise) -> Noise:
        """This noise where `rows`, `(batch,)` bool, is true, and `other`, bound to the same places, elsewhere."""
        return replace(self, keys=torch.where(rows, self.keys, other.keys))

    def stream(self, name: str, root: Tensor | None = None) -> Noise:
        """Noise for something other than the target's choices, shared with nothing else and never read twice.

        The round is mixed in because tokens are thrown away: what block verification decides at one position depends
        on the tokens drafted at later ones, so noise that returned in the next round would not be fresh.

        Args:
            name: "draft", "accept" or "residual".
            root: `(batch,)` int64, any position that no other round of the row gives; `self.root` unless given.

        Raises:
            ValueError: without a root.
        """
        root = self.root if root is None else root
        if root is None:
            raise ValueError("A stream belongs to a round: bind the noise with `at` first, or pass `root`.")
        return replace(self, keys=_mix(_mix(self.keys + _STREAMS[name]) + root * _STEP))

    def perturb(self, scores: Tensor) -> Tensor:
        """`scores` plus Gumbel noise; the `k` largest are a draw of `k` without replacement from `softmax(scores)`.

        Args:
            scores: `(batch, n, vocab)`, for the nodes that `at` has bound. -inf stays -inf.

        Returns:
            `(batch, n, vocab)` float64.
        """
        state, flat = self._flat(scores)
        counter = self._counter(scores)
        perturbed = flat.to(torch.float64, copy=True)
        for part in _chunks(scores):
            perturbed[part] += _gumbel(state[part], counter)
        return perturbed.view(scores.shape)

    def argmax(self, scores: Tensor) -> Tensor:
        """The choice that `perturb(scores).argmax(-1)` makes, without a float64 copy of everything.

        Args:
            scores: `(batch, n, vocab)`, for the nodes that `at` has bound.

        Returns:
            `(batch, n)` int64.
        """
        state, flat = self._flat(scores)
        if flat.device.type == "cpu":
            finite = flat != -torch.inf
            if _SPARSE * int(finite.sum()) <= finite.numel():
                return _sparse_argmax(state, flat, finite).view(scores.shape[:-1])
        counter = self._counter(scores)
        chosen = [(_gumbel(state[part], counter) + flat[part]).argmax(-1) for part in _chunks(scores)]
        return torch.cat(chosen).view(scores.shape[:-1])

    def uniform(self) -> Tensor:
        """`(batch, n)` float64 in (0, 1), one number a bound node, independent of what `perturb` adds there."""
        return _uniform(_mix(self._state()))

    def _bound(self) -> Tensor:
        if self.positions is None:
            raise ValueError("This noise is not bound to positions: call `at` first.")
        return self.positions

    def _state(self) -> Tensor:
        """`(batch, n)`, a key a node: counter 0 is the node's uniform, token t has counter t + 1."""
        return _mix(self.keys.unsqueeze(1) + self._bound() * _STEP)

    def _flat(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self._state().view(-1, 1), scores.reshape(-1, scores.shape[-1])

    def _counter(self, scores: Tensor) -> Tensor:
        return torch.arange(1, scores.shape[-1] + 1, device=scores.device) * _STEP


def _chunks(scores: Tensor) -> list[slice]:
    """Groups of nodes that are hashed at once."""
    *lead, vocab = scores.shape
    nodes = 1
    for size in lead:
        nodes *= size
    step = max(1, (_CPU_CHUNK if scores.device.type == "cpu" else _DEVICE_CHUNK) // max(1, vocab))
    return [slice(start, start + step) for start in range(0, nodes, step)]


def _sparse_argmax(state: Tensor, scores: Tensor, finite: Tensor) -> Tensor:
    """`Noise.argmax` for a few finite scores a node; it reads their number, so it is for the CPU."""
    nodes = scores.shape[0]
    node, token = finite.nonzero(as_tuple=True)
    if not len(node):
        return torch.zeros(nodes, dtype=torch.long)
    value = _gumbel(state[node, 0], (token + 1) * _STEP) + scores[node, token]
    # Packed to the left in order of the ids, so that a tie goes to the same token.
    count = torch.bincount(node, minlength=nodes)
    place = torch.arange(len(node)) - (count.cumsum(0) - count)[node]
    shape = nodes, int(count.max())
    values = torch.full(shape, -torch.inf, dtype=torch.float64).index_put_((node, place), value)
    tokens = torch.zeros(shape, dtype=torch.long).index_put_((node, place), token)
    return tokens.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def fresh_seed() -> int:
    """A 64-bit seed from torch's default generator, which it advances, as stock sampling does."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.long, device="cpu"))


# One row's result depends on that row's scores alone: they may see any rows, in any order, any number of times.
PURE: tuple[type[LogitsProcessor], ...] = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TopHLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.BarkEosPrioritizerLogitsProcessor,
)

# One row's result depends on that row's ids and scores alone, and nothing is remembered between calls. The encoders'
# repetition and n-gram processors are not here: which of their rows is meant depends on the number of rows shown.
SEPARABLE: tuple[type[LogitsProcessor], ...] = (
    stock.RepetitionPenaltyLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.ExponentialDecayLengthPenalty,
    stock.SuppressTokensAtBeginLogitsProcessor,
)


class Processors:
    """A call's logits processors, with what is known about them. The user's objects are never changed.

    Only exact types count as known: a subclass may do anything.

    Attributes:
        pure: all are in `PURE`.
        separable: all are in `PURE` or `SEPARABLE`.
        empty: there are none.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        """Takes the processors in the order in which they run.

        Args:
            processors: a `LogitsProcessorList`, as `generate` prepares it.
        """
        self._processors = LogitsProcessorList(processors)
        types = [type(processor) for processor in self._processors]
        self.pure = all(kind in PURE for kind in types)
        self.separable = all(kind in PURE or kind in SEPARABLE for kind in types)
        self.empty = not types

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """What stock generation does with one token of each row.

        Args:
            ids: `(rows, length)`, the prefix.
            scores: `(rows, vocab)` float32; a processor may write into it.

        Returns:
            `(rows, vocab)`, the scores to choose from.
        """
        if not self.separable:
            return self._processors(cast(torch.LongTensor, ids), scores)
        # The list looks up the signature of every member at every call; the known ones take these two arguments.
        for processor in self._processors:
            scores = processor(ids, scores)
        return scores

    def row(self, b: int) -> Processors:
        """The processors to use when, of all rows, only row `b` is shown; separable lists only."""
        return Processors(_one_row(processor, b) for processor in self._processors)

    def warp(self, scores: Tensor) -> Tensor:
        """Runs pure processors over any number of nodes, each in one call.

        Args:
            scores: `(batch, n, vocab)` float32.

        Returns:
            `(batch, n, vocab)`.

        Raises:
            ValueError: if the list is not pure.
        """
        if not self.pure:
            raise ValueError("warp shows no prefix: it takes pure processors only.")
        flat = scores.reshape(-1, scores.shape[-1])
        ids = torch.empty((flat.shape[0], 0), dtype=torch.long, device=scores.device)
        return self(ids, flat).view(scores.shape)

    def for_drafts(self) -> Processors:
        """What a drafter may run on ids without padding: the pure and the separable ones, in order, as its own."""
        known = (processor for processor in self._processors if type(processor) in PURE + SEPARABLE)
        return Processors(_without_padding(_unprepared(processor)) for processor in known)

    def to(self, device: torch.device | str) -> Processors:
        """Known processors with what they hold on `device`, for a drafter that runs elsewhere."""
        return Processors(_moved(_unprepared(processor), device) for processor in self._processors)


def _one_row(processor: LogitsProcessor, b: int) -> LogitsProcessor:
    """`RepetitionPenalty` is the one separable processor that holds a number a row: how much of it is padding."""
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor:
        padding = processor.prompt_ignore_length
        if isinstance(padding, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = padding[b : b + 1]
    return processor


def _without_padding(processor: LogitsProcessor) -> LogitsProcessor:
    """`generate` passes the padding's length as a tensor; an integer is a user's wish and stays."""
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = None
    return processor


def _unprepared(processor: LogitsProcessor) -> LogitsProcessor:
    """A biasing processor settles on a vocabulary size and a device when first called; a drafter's may differ."""
    if isinstance(processor, stock.SequenceBiasLogitsProcessor):  # NoBadWords is one too
        processor = copy.copy(processor)
        processor.prepared_bias_variables = False
    return processor


def _moved(processor: LogitsProcessor, device: torch.device | str) -> LogitsProcessor:
    processor = copy.copy(processor)
    vars(processor).update({key: value.to(device) for key, value in vars(processor).items() if torch.is_tensor(value)})
    return processor
