"""Loss functions over tensors: what a drafter says against a label, or against its target's distribution.

No model, no data, no state. Half precision is computed in float32. Every loss is a sum over places divided by a count
that the caller gives: with that of the whole accumulation window, of all ranks, the parts of a batch add up to what the
whole batch gives, however long its rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Places with this label are not trained on.
IGNORED = -100

# Log-probabilities end here: times a probability of 0 it is 0, where -inf would be NaN.
LOWEST = -1e4

# The least mass of all ids outside a top-k: less than what rounding in storage takes from or adds to the rest.
LEAST_REST = 1e-6


@dataclass(frozen=True)
class TopK:
    """A distribution of which only the likeliest ids are known.

    All other ids are one class that holds the rest of the mass; the student's are added up into the same class. Over
    these k + 1 classes every divergence is at most that of the whole distributions, and nothing is learned about how
    the rest is shared out. A temperature is applied to the classes.

    Args:
        ids: `(..., k)`, no id twice.
        log_probs: `(..., k)` of these, natural logarithms, at temperature 1.
    """

    ids: Tensor
    log_probs: Tensor

    def __getitem__(self, places: Tensor | slice) -> TopK:
        """Only some places: a mask or indices of shape `(...)`, or a slice of the first axis."""
        return TopK(self.ids[places], self.log_probs[places])


# Logits `(..., vocab)` or the likeliest ids.
Teacher = Tensor | TopK

# Of two tensors of log-probabilities `(..., classes)`, the student's and the teacher's, how far each place is apart.
Kind = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Negative log-likelihood of the labels.

    Args:
        logits: `(..., vocab)`.
        labels: `(...)`, of the same places: whoever predicts the next token shifts before. `IGNORED` is left out.
        count: what to divide the sum by; None for the labels that count.

    Returns:
        A scalar; 0, with a gradient of 0, where no label counts.
    """
    kept = labels != IGNORED
    # Places that do not count are taken out and not multiplied by 0: whatever stands there, NaN too, has no say.
    return mean(F.cross_entropy(_wide(logits[kept]), labels[kept], reduction="none"), count)


def divergence(
    kind: str | Kind,
    student_logits: Tensor,
    teacher: Teacher,
    mask: Tensor | None = None,
    count: Tensor | float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """How far the student's distribution is from the teacher's; no gradient reaches the teacher's.

    Args:
        kind: "forward_kl", "reverse_kl", "jsd" or "tvd" (arXiv 2310.08461, 2306.13649); or a function like these, for
            example `functools.partial(jsd, beta=0.1)`.
        student_logits: `(..., vocab)`.
        teacher: the teacher's logits `(..., vocab)` of the same places, or its likeliest ids.
        mask: `(...)`, the places that count; None for all.
        count: what to divide the sum by; None for the places that count.
        temperature: divides the logits of both. The loss is not multiplied by its square.

    Returns:
        A scalar; 0, with a gradient of 0, where no place counts.

    Raises:
        ValueError: there is no such kind, or the temperature is not above 0.
    """
    apart = DIVERGENCES.get(kind) if isinstance(kind, str) else kind
    if apart is None:
        raise ValueError(f"there is no divergence {kind!r}; there are {', '.join(DIVERGENCES)}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if mask is not None:
        student_logits = student_logits[mask]
        teacher = teacher[mask]
    return mean(apart(*_both(student_logits, teacher, temperature)), count)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) in nats, `(...)`, from log-probabilities `(..., classes)`: covers all the teacher says."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) in nats, `(...)`: says nothing that the teacher would not."""
    return forward_kl(teacher, student)


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence of arXiv 2306.13649 in nats, `(...)`.

    Args:
        student: log-probabilities `(..., classes)`.
        teacher: of the same shape.
        beta: between 0 and 1, the teacher's share of the mixture both are compared with. Divided by beta it nears the
            forward KL as beta nears 0; divided by 1 - beta it nears the reverse KL as beta nears 1.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta must be between 0 and 1, not {beta}")
    weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(teacher + weight.log(), student + (-weight).log1p())
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    """The total variation distance, `(...)`: the chance that a sampled draft token is refused (arXiv 2211.17192)."""
    return (student.exp() - teacher.exp()).abs().sum(-1) / 2


DIVERGENCES: dict[str, Kind] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd}


@torch.no_grad()
def acceptance(student_logits: Tensor, teacher: Teacher, temperature: float = 1.0) -> Tensor:
    """The chance that rejection sampling keeps a token drawn from the student, `(...)`: 1 - TVD.

    Against a `TopK` it is an upper bound, too high by at most the mass outside.
    """
    return 1 - tvd(*_both(student_logits, teacher, temperature))


@torch.no_grad()
def agreement(student_logits: Tensor, teacher: Teacher) -> Tensor:
    """Whether both find the same token likeliest, `(...)` bool: whether a greedy draft token is kept."""
    if isinstance(teacher, TopK):
        best = teacher.ids.gather(-1, teacher.log_probs.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        best = teacher.argmax(-1)
    return student_logits.argmax(-1) == best


def _both(student_logits: Tensor, teacher: Teacher, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the student and the teacher over the same classes."""
    student = _wide(student_logits)
    if isinstance(teacher, TopK):
        student, theirs = _student_classes(student, teacher.ids), _teacher_classes(_wide(teacher.log_probs.detach()))
    else:
        theirs = _wide(teacher.detach())
    return _log_probs(student, temperature), _log_probs(theirs, temperature)


def _student_classes(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits of the ids and of all others together, `(..., k + 1)`."""
    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), rest.clamp_min(LOWEST)], dim=-1)


def _teacher_classes(log_probs: Tensor) -> Tensor:
    """Log-probabilities of the ids and of all others together, `(..., k + 1)`."""
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp_min(LEAST_REST).log()], dim=-1)


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).clamp_min(LOWEST)


def _wide(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def mean(values: Tensor, count: Tensor | float | None) -> Tensor:
    """The sum of `(places,)` divided by a count, None for their number; a sum of nothing is 0 whatever the count."""
    if count is None:
        count = values.numel()
    return values.sum() / torch.as_tensor(count, dtype=values.dtype, device=values.device).clamp_min(1)
