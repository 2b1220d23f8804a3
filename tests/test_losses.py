"""Loss functions of the trainings: against loops in float64, and by what must hold for any two distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from learning import losses
from learning.losses import TopK, acceptance, agreement, cross_entropy, divergence
from torch import Tensor

KINDS: dict[str, str | losses.Kind] = {
    **{name: name for name in losses.DIVERGENCES},
    "jsd .1": partial(losses.jsd, beta=0.1),
    "jsd .9": partial(losses.jsd, beta=0.9),
}
SEEDS = range(8)
CLASSES = 7


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str | losses.Kind:
    return KINDS[request.param]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits, the sharper the greater the seed."""
    generator = torch.Generator().manual_seed(seed)
    return ((1 + seed) * torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)).to(dtype)


def pair(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits of a student, with a gradient, and of a teacher."""
    return draw(seed, *shape, dtype=dtype).requires_grad_(), draw(seed + 100, *shape, dtype=dtype) / 100


def top(logits: Tensor, k: int) -> TopK:
    """The teacher of these logits as its k likeliest ids."""
    kept = logits.log_softmax(-1).topk(k)
    return TopK(kept.indices, kept.values)


def probabilities(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kl(p: list[float], q: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def slow_jsd(p: list[float], q: list[float], beta: float) -> float:
    mixture = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


# From the teacher's probabilities and the student's.
SLOW: dict[str, Callable[[list[float], list[float]], float]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": partial(slow_jsd, beta=0.5),
    "jsd .1": partial(slow_jsd, beta=0.1),
    "jsd .9": partial(slow_jsd, beta=0.9),
    "tvd": lambda p, q: sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_divergence_is_what_a_loop_over_places_and_ids_gives(name: str, temperature: float) -> None:
    for seed in SEEDS:
        student, teacher = (logits.detach() for logits in pair(seed, 3, 4))
        mask = torch.arange(12).view(3, 4) % 3 > 0
        found = divergence(KINDS[name], student, teacher, mask, 5, temperature)
        total = 0.0
        for row in range(3):
            for place in range(4):
                if mask[row, place]:
                    p, q = (probabilities(x[row, place].tolist(), temperature) for x in (teacher, student))
                    total += SLOW[name](p, q)
        assert float(found) == pytest.approx(total / 5, rel=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_with_the_likeliest_ids_the_rest_is_one_class(name: str) -> None:
    for seed in SEEDS:
        student, teacher = (logits.detach() for logits in pair(seed, 6))
        known = top(teacher, 3)
        total = 0.0
        for place in range(6):
            p, q = (probabilities(x[place].tolist()) for x in (teacher, student))
            ids = known.ids[place].tolist()
            p, q = ([x[i] for i in ids] + [sum(x) - sum(x[i] for i in ids)] for x in (p, q))
            total += SLOW[name](p, q)
        found = float(divergence(KINDS[name], student, known, None, 1))
        assert found == pytest.approx(total, rel=1e-6)
        assert found <= float(divergence(KINDS[name], student, teacher, None, 1)) + 1e-9


def test_with_all_ids_but_one_the_rest_is_that_one(kind: str | losses.Kind) -> None:
    student, teacher = (logits.detach() for logits in pair(0, 6))
    known = top(teacher, CLASSES - 1)
    for temperature in (1.0, 2.5):
        whole = divergence(kind, student, teacher, temperature=temperature)
        assert float(divergence(kind, student, known, temperature=temperature)) == pytest.approx(float(whole), rel=1e-9)


def test_cross_entropy_is_what_a_loop_over_places_gives() -> None:
    for seed in SEEDS:
        logits = draw(seed, 3, 4)
        labels = torch.arange(12).view(3, 4) % CLASSES
        labels[1, 1:] = losses.IGNORED
        total = 0.0
        for row in range(3):
            for place in range(4):
                if labels[row, place] != losses.IGNORED:
                    total -= math.log(probabilities(logits[row, place].tolist())[int(labels[row, place])])
        assert float(cross_entropy(logits, labels, 7)) == pytest.approx(total / 7)
        assert float(cross_entropy(logits, labels)) == pytest.approx(total / 9)


def test_a_divergence_is_above_0_and_0_without_a_gradient_where_both_are_equal(kind: str | losses.Kind) -> None:
    for seed in SEEDS:
        student, teacher = pair(seed, 5)
        assert float(divergence(kind, student, teacher).detach()) > 0
        for known in (student.detach().clone(), top(student.detach(), 3)):
            loss = divergence(kind, student, known)
            (gradient,) = torch.autograd.grad(loss, student)
            assert float(loss.detach()) == pytest.approx(0, abs=1e-5)
            # Of the likeliest ids the rest is only equal to rounding, and the TVD has a corner at 0.
            assert gradient.abs().max() < 1e-5 or (kind == "tvd" and isinstance(known, TopK))


def test_tvd_and_jsd_are_bounded_and_symmetric() -> None:
    for seed in SEEDS:
        student, teacher = (logits.detach() for logits in pair(seed, 5))
        for name, most in {"tvd": 1.0, "jsd": math.log(2)}.items():
            for place in range(5):
                one = float(divergence(name, student[place], teacher[place]))
                assert 0 < one < most
                assert one == pytest.approx(float(divergence(name, teacher[place], student[place])))
    # Nothing in common: the bound itself.
    apart = torch.tensor([200.0, 0.0]), torch.tensor([0.0, 200.0])
    assert float(divergence("tvd", *apart)) == pytest.approx(1)
    assert float(divergence("jsd", *apart)) == pytest.approx(math.log(2))


def test_jsd_nears_both_kls() -> None:
    student, teacher = (logits.detach() for logits in pair(0, 5))
    small = 1e-6
    forward = divergence(partial(losses.jsd, beta=small), student, teacher) / small
    reverse = divergence(partial(losses.jsd, beta=1 - small), student, teacher) / small
    assert float(forward) == pytest.approx(float(divergence("forward_kl", student, teacher)), rel=1e-3)
    assert float(reverse) == pytest.approx(float(divergence("reverse_kl", student, teacher)), rel=1e-3)


def test_a_constant_added_to_the_logits_of_a_place_changes_nothing(kind: str | losses.Kind) -> None:
    student, teacher = (logits.detach() for logits in pair(1, 5))
    by = 30 * draw(2, 5)[:, :1]
    known = float(divergence(kind, student, teacher))
    assert float(divergence(kind, student + by, teacher)) == pytest.approx(known)
    assert float(divergence(kind, student, teacher + by)) == pytest.approx(known)
    labels = torch.arange(5)
    assert float(cross_entropy(student + by, labels)) == pytest.approx(float(cross_entropy(student, labels)))


def test_the_gradient_is_the_slope(kind: str | losses.Kind) -> None:
    student, teacher = pair(0, 3)
    for known in (teacher, top(teacher, 3)):
        assert torch.autograd.gradcheck(lambda x, t=known: divergence(kind, x, t, None, 2, 1.5), student)


def test_no_gradient_reaches_the_teacher(kind: str | losses.Kind) -> None:
    student, teacher = pair(0, 3)
    teacher.requires_grad_()
    divergence(kind, student, teacher).backward()
    assert teacher.grad is None


@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_places_that_do_not_count_have_no_say_and_no_gradient(kind: str | losses.Kind, junk: float) -> None:
    student, teacher = pair(1, 2, 3)
    counts = torch.tensor([[True, False, True], [False, False, False]])
    with torch.no_grad():
        student[~counts] = junk
        teacher[~counts] = junk
    labels = torch.where(counts, 2, losses.IGNORED)
    for loss in (divergence(kind, student, teacher, counts), cross_entropy(student, labels)):
        (gradient,) = torch.autograd.grad(loss, student)
        assert torch.isfinite(loss)
        assert (gradient[~counts] == 0).all()
        assert (gradient[counts] != 0).all()


def test_where_nothing_counts_the_loss_is_0_with_a_gradient(kind: str | losses.Kind) -> None:
    for count in (None, 0, torch.tensor(0), 3):
        student, teacher = pair(1, 2, 3)
        nothing = torch.zeros(2, 3, dtype=torch.bool)
        masked = torch.full((2, 3), losses.IGNORED)
        for loss in (
            divergence(kind, student, teacher, nothing, count),
            divergence(kind, student, top(teacher, 2), nothing, count),
            cross_entropy(student, masked, count),
        ):
            (gradient,) = torch.autograd.grad(loss, student)
            assert float(loss.detach()) == 0
            assert (gradient == 0).all()


def test_parts_divided_by_the_whole_count_add_up_to_the_whole(kind: str | losses.Kind) -> None:
    """Rows of 11 and 101 places; the mean of their means is another number."""
    student, teacher = pair(1, 2, 101)
    mask = torch.ones(2, 101, dtype=torch.bool)
    mask[0, 11:] = False
    labels = torch.where(mask, torch.arange(101) % CLASSES, losses.IGNORED)

    def both(rows: slice, count: int | None) -> list[Tensor]:
        return [
            divergence(kind, student[rows], teacher[rows], mask[rows], count),
            cross_entropy(student[rows], labels[rows], count),
        ]

    whole, first, second = both(slice(2), None), both(slice(1), 112), both(slice(1, 2), 112)
    means = [(one + other) / 2 for one, other in zip(both(slice(1), None), both(slice(1, 2), None), strict=True)]
    for total, one, other, mean in zip(whole, first, second, means, strict=True):
        assert float((one + other).detach()) == pytest.approx(float(total.detach()))
        slopes = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (total, one + other)]
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)
        assert float(mean.detach()) != pytest.approx(float(total.detach()), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: str | losses.Kind, dtype: torch.dtype) -> None:
    student, teacher = pair(2, 40, dtype=dtype)
    labels = torch.arange(40) % CLASSES
    for known in (teacher, top(teacher, 3)):
        wide = known.float() if isinstance(known, Tensor) else TopK(known.ids, known.log_probs.float())
        loss = divergence(kind, student, known)
        assert loss.dtype == torch.float32
        assert float(loss.detach()) == float(divergence(kind, student.detach().float(), wide))
    loss = cross_entropy(student, labels)
    assert float(loss.detach()) == float(cross_entropy(student.detach().float(), labels))
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_certainty_and_ids_that_cannot_be_said_leave_numbers(kind: str | losses.Kind, dtype: torch.dtype) -> None:
    """Logits of -inf, one id with all the mass, and a top-k whose rounded mass is above 1."""
    sure = torch.tensor([[60.0, 0.0, -torch.inf, 0.0], [0.0, -torch.inf, 0.0, 60.0]], dtype=dtype)
    more = TopK(torch.tensor([[0, 1], [3, 2]]), torch.tensor([[0.0, -7.0], [0.0, -7.0]], dtype=dtype))
    for student in (sure, sure.flip(-1), torch.zeros_like(sure)):
        for teacher in (sure, more):
            student = student.detach().clone().requires_grad_()
            loss = divergence(kind, student, teacher)
            (gradient,) = torch.autograd.grad(loss, student)
            assert torch.isfinite(loss)
            assert torch.isfinite(gradient).all()
            assert float(loss.detach()) > -1e-6


def test_acceptance_is_the_chance_that_a_drawn_token_is_kept() -> None:
    student, teacher = pair(0, 1)
    p, q = teacher[0].softmax(-1), student.detach()[0].softmax(-1)
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    kept = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(1)) < (p / q)[drawn]
    found = float(acceptance(student, teacher))
    assert found == pytest.approx(float(kept.float().mean()), abs=0.005)
    assert found == pytest.approx(1 - float(divergence("tvd", student, teacher).detach()))
    assert found <= float(acceptance(student, top(teacher, 2))) <= 1


def test_agreement_is_whether_a_greedy_draft_is_kept() -> None:
    student, teacher = pair(0, 50)
    found = agreement(student, teacher)
    wanted = [s.index(max(s)) == t.index(max(t)) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    assert found.tolist() == wanted
    known = top(teacher, 3)
    shuffled = TopK(known.ids.flip(-1), known.log_probs.flip(-1))
    assert agreement(student, shuffled).tolist() == wanted
    assert 0 < sum(wanted) < 50


def test_what_is_no_divergence_is_refused() -> None:
    student, teacher = pair(0, 2)
    with pytest.raises(ValueError, match="there is no divergence 'kl'; there are forward_kl, reverse_kl, jsd, tvd"):
        divergence("kl", student, teacher)
    with pytest.raises(ValueError, match="temperature must be above 0, not 0"):
        divergence("tvd", student, teacher, temperature=0)
    for beta in (0.0, 1.0):
        with pytest.raises(ValueError, match="beta must be between 0 and 1"):
            divergence(partial(losses.jsd, beta=beta), student, teacher)
