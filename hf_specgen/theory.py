"""What speculative decoding gains, as arithmetic: tokens a round, speed-up, draft length, batch, length of a call.

A round drafts a chain of `k` tokens, checks it in one pass, and keeps the accepted ones and one token of the target's
own. With `a` the probability that a drafted token is accepted given that those before it were (arXiv 2211.17192):

    expected tokens   E(a, k) = 1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a)
    speed-up          S(a, k) = E(a, k) / (c k + v(k))

`c` is the time of drafting one token and `v(k)` that of a pass that checks `k`, both in units of a plain pass, so that
`v(0)` is 1. The paper's `v` is 1 throughout, which holds while a pass takes the time of reading the weights; `Roofline`
says when it does (arXiv 2408.11049 does the same for long contexts). Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# One probability for every depth, or one a depth from the first drafted token on.
AcceptanceRates = float | Sequence[float]


def flat(k: int) -> float:
    """A pass that checks any number of tokens for the price of one, as in arXiv 2211.17192."""
    return 1.0


def expected_tokens(acceptance: AcceptanceRates, k: int) -> float:
    """The mean number of tokens a round decides, the target's own one included: Eq. 1 of arXiv 2211.17192.

    Args:
        acceptance: the probability that a token is accepted, given that those before it were.
        k: drafted tokens.

    Returns:
        `1 + a1 + a1 a2 + ... + a1 ... ak`, between 1 and `k + 1`; `(1 - a^(k+1)) / (1 - a)` where all are `a`.

    Raises:
        ValueError: `k` is negative or deeper than what is known, or a probability is none.
    """
    if k < 0:
        raise ValueError(f"k={k} is no number of tokens; it must be 0 or more")
    if isinstance(acceptance, Sequence):
        if k > len(acceptance):
            raise ValueError(f"acceptance is known for {len(acceptance)} depths, and k={k} asks for more")
        depths = [_probability(a) for a in acceptance[:k]]
        return 1 + sum(math.prod(depths[:depth]) for depth in range(1, k + 1))
    a = _probability(acceptance)
    return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def _probability(a: float) -> float:
    if not 0 <= a <= 1:
        raise ValueError(f"acceptance {a} is no probability; it must lie between 0 and 1")
    return a


def speed_up(acceptance: AcceptanceRates, k: int, draft: float = 0.0, verify: Callable[[int], float] = flat) -> float:
    """Tokens per second against plain decoding: Theorem 3.8 of arXiv 2211.17192, with a price for the width.

    Args:
        acceptance: as in `expected_tokens`.
        k: drafted tokens.
        draft: `c`, the time of drafting one token in units of a plain pass.
        verify: `v`, the time of a pass that checks so many tokens in units of a plain pass; `Roofline.verify`, a
            measured table's `__getitem__`, or any function.

    Returns:
        `E / (c k + v(k))`; below 1 is a loss.
    """
    return expected_tokens(acceptance, k) / (draft * k + verify(k))


def best_k(
    acceptance: AcceptanceRates, draft: float = 0.0, verify: Callable[[int], float] = flat, most: int | None = None
) -> int:
    """The number of drafted tokens with the largest speed-up; 0 where none beats plain decoding, the least of equals.

    Args:
        acceptance: as in `expected_tokens`.
        draft: as in `speed_up`.
        verify: as in `speed_up`.
        most: the largest number to look at. None: every depth that a sequence of acceptances knows, else 32.

    Returns:
        The number.
    """
    if most is None:
        most = len(acceptance) if isinstance(acceptance, Sequence) else 32
    return max(range(most + 1), key=lambda k: speed_up(acceptance, k, draft, verify))


@dataclass(frozen=True)
class Machine:
    """What a pass runs on.

    Attributes:
        flops: floating-point operations a second, at best.
        bandwidth: bytes a second from memory, at best.
        launch_s: what a pass costs whatever it does.
    """

    flops: float
    bandwidth: float
    launch_s: float = 0.0


@dataclass(frozen=True)
class Model:
    """What a pass has to read and to compute.

    Attributes:
        weights: how many each token is multiplied with: of a mixture of experts the active ones.
        weight_bytes: of one weight: 4 in float32, 2 in bfloat16.
        cache_bytes: keys and values of one token in all layers, `2 * layers * kv_heads * head_dim * bytes`.
        attention_flops: of one token over one token of context, `4 * layers * heads * head_dim`.
    """

    weights: float
    weight_bytes: float
    cache_bytes: float = 0.0
    attention_flops: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """A model on a machine: a pass takes the longer of its arithmetic and its reading, and neither less.

        FLOPs = batch * tokens * (2 * weights + context * attention_flops)
        bytes = weights * weight_bytes + batch * context * cache_bytes

    The weights are read once for the whole batch and a row's keys and values once for all its tokens. So checking is
    free while reading takes longer, less of it is the larger the batch, and more again where long contexts make the
    reading of keys and values prevail (arXiv 2408.11049).

    Attributes:
        model: what is computed.
        machine: what computes.
        batch: rows in a pass.
        context: tokens a row has in the cache.
    """

    model: Model
    machine: Machine
    batch: int = 1
    context: float = 0

    def pass_s(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens a row."""
        flops = self.batch * tokens * (2 * self.model.weights + self.context * self.model.attention_flops)
        read = self.model.weights * self.model.weight_bytes + self.batch * self.context * self.model.cache_bytes
        return self.machine.launch_s + max(flops / self.machine.flops, read / self.machine.bandwidth)

    def verify(self, k: int) -> float:
        """`v(k)`: a pass over the root and `k` drafted tokens a row, in units of a plain pass of this batch."""
        return self.pass_s(k + 1) / self.pass_s(1)


@dataclass(frozen=True)
class Drafting:
    """How a call drafts.

    Attributes:
        acceptance: as in `expected_tokens`.
        k: drafted tokens a round.
        model: the draft model, which reads the prompt too and makes a pass a drafted token; None drafts for nothing.
    """

    acceptance: AcceptanceRates
    k: int
    model: Model | None = None


PLAIN = Drafting(acceptance=0.0, k=0)


def call_s(model: Model, machine: Machine, lengths: tuple[int, int], batch: int = 1, how: Drafting = PLAIN) -> float:
    """Seconds of a whole call, the prompt's pass and `output - 1` tokens after it.

        prefill(prompt) + (output - 1) / E * (k * draft pass + verify pass)

    The prompt's pass decides the first token and gains nothing, so a call gains the less the longer its prompt and the
    shorter its output. The passes are taken at the mean context, `prompt + output / 2`; that rows end at different
    times is left out.

    Args:
        model: the target.
        machine: what it runs on.
        lengths: tokens a row of the prompt and of the output, both at least 1.
        batch: rows.
        how: what is drafted.

    Returns:
        The seconds.

    Raises:
        ValueError: a length below 1, or as in `expected_tokens`.
    """
    prompt, output = lengths
    if prompt < 1 or output < 1:
        raise ValueError(f"lengths={lengths} must be a prompt and an output of one token or more")
    target = Roofline(model, machine, batch, context=prompt + output / 2)
    # Each token of a prompt sees those before it: half of it, on average.
    reading = replace(target, context=prompt / 2)
    prefill, round_s = reading.pass_s(prompt), target.pass_s(how.k + 1)
    if how.model is not None:
        prefill += replace(reading, model=how.model).pass_s(prompt)
        round_s += how.k * replace(target, model=how.model).pass_s(1)
    return prefill + (output - 1) / expected_tokens(how.acceptance, how.k) * round_s
