"""The draft length "auto": a controller against made-up costs, acceptance and clocks. No model, no real time."""

import copy
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

import hf_specgen as sg
from hf_specgen import theory
from hf_specgen.acceptance import Acceptance
from hf_specgen.costs import LADDER, Costs, Curve, Platform
from hf_specgen.draft import Draft
from hf_specgen.length import AutoController, Situation, as_length, within
from hf_specgen.stats import Step

FLAT = dict.fromkeys(LADDER, 2.0) | {0: 1.0}


def linear(first: float, slope: float) -> Callable[[int], float]:
    """Seconds by width: 1 for plain decoding, `first` as soon as anything is drafted, and so much more a node."""
    return lambda width: first + slope * width if width else 1.0


@dataclass
class World:
    """A target and a drafter of chains that exist as numbers only.

    Attributes:
        seconds: of a pass, by width and round.
        right: the chance that a drafted token is right if its parent is, by round.
        draft_s: seconds of a draft, by depth.
        says: the drafter's own estimate; None says nothing, like a draft model.
        noise: spread of the measured seconds.
        batch: rows.
    """

    seconds: Callable[[int, int], float]
    right: Callable[[int], float]
    draft_s: Callable[[int], float] = lambda depth: 1e-3
    says: float | None = None
    noise: float = 0.05
    batch: int = 1
    dice: random.Random = field(default_factory=lambda: random.Random(3))
    widths: list[int] = field(default_factory=list)
    gained: list[int] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)

    def run(self, controller, rounds: int) -> "World":
        """Decodes so many rounds."""
        if not self.widths:
            controller.update(Step([[0]] * self.batch, [0] * self.batch, [0] * self.batch, seconds=9.0))
        for _ in range(rounds):
            now = len(self.widths)
            depth = controller.depth(64)
            draft_s = self.draft_s(depth) if depth else 0.0
            draft = self._draft(depth)
            chosen = controller.choose(draft)
            checked = int((chosen.parents >= 0).sum(1).max()) if chosen.nodes else 0
            runs = [self._run(depth, now) for _ in range(self.batch)]
            kept = [min(run, checked) for run in runs]
            # Token 1 is what drafts are made of, token 2 is what comes where they are wrong.
            tokens = [[1] * count + [1 if count < run else 2] for count, run in zip(kept, runs, strict=True)]
            true_s = self.seconds(chosen.nodes, now) + draft_s
            seconds = (true_s - draft_s) * self.dice.lognormvariate(0, self.noise) + draft_s
            controller.update(
                Step(tokens, [checked] * self.batch, kept, chosen.nodes, draft_s, seconds - draft_s, seconds)
            )
            self.widths.append(chosen.nodes)
            self.gained.append(sum(map(len, tokens)))
            self.spent.append(true_s)
        return self

    def _draft(self, depth: int) -> Draft:
        tokens = torch.ones((self.batch, depth), dtype=torch.long)
        draft = Draft.chain(tokens, [depth] * self.batch) if depth else Draft.empty(self.batch)
        if self.says is None or not depth:
            return draft
        return Draft(draft.tokens, draft.parents, confidence=torch.full(tokens.shape, self.says), is_chain=True)

    def _run(self, depth: int, now: int) -> int:
        """How many tokens of an endless draft would be right."""
        count = 0
        while count < depth and self.dice.random() < self.right(now):
            count += 1
        return count

    def speed(self, start: int = 0, end: int | None = None) -> float:
        """Tokens a second of some rounds; a plain row has 1."""
        return sum(self.gained[start:end]) / sum(self.spent[start:end])

    def width(self, start: int = 0, end: int | None = None) -> float:
        return statistics.median(self.widths[start:end])


def auto(batch: int = 1, costs: Costs | None = None, threads: int = 1) -> AutoController:
    return sg.Auto(most=16).start(Situation(batch, "made-up", Platform(threads), costs or Costs()))


def best_fixed(world: Callable[[], World], rounds: int, depths=(0, 1, 2, 3, 4, 6, 8, 12, 16)) -> float:
    """Tokens a second of the best fixed depth of a static sweep."""
    return max(world().run(sg.Fixed(depth), rounds).speed() for depth in depths)


# ----------------------------------------------------------------------------------------------------- it converges

WORLDS = {
    "a cheap drafter that is mostly right": lambda: World(lambda w, _: linear(2, 0.02)(w), lambda _: 0.9, says=0.9),
    "a cheap one that is mostly wrong": lambda: World(lambda w, _: linear(2, 0.02)(w), lambda _: 0.2, says=0.2),
    "a cheap one that thinks too well of itself": lambda: World(
        lambda w, _: linear(2, 0.02)(w), lambda _: 0.3, says=0.8
    ),
    "an accelerator": lambda: World(lambda w, _: linear(1, 0.02)(w), lambda _: 0.7, says=0.7),
    "a draft model that pays": lambda: World(
        lambda w, _: linear(1.1, 0.01)(w), lambda _: 0.8, draft_s=lambda depth: 0.08 * depth
    ),
    "a draft model that does not": lambda: World(
        lambda w, _: linear(2, 0.01)(w), lambda _: 0.6, draft_s=lambda depth: 0.4 * depth
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_within_three_percent_of_the_best_fixed_depth(name):
    world = WORLDS[name]().run(auto(), 600)
    assert world.speed() >= 0.97 * best_fixed(WORLDS[name], 3000)


@pytest.mark.parametrize("right", [0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize(("threads", "verify"), [(0, linear(1.02, 0.02)), (1, linear(1.7, 0.02))])
def test_it_reaches_the_speed_up_that_theory_knows(right, threads, verify):
    best = theory.best_k(right, verify=verify, most=16)
    known = theory.speed_up(right, best, verify=verify)
    speeds = [
        World(lambda w, _: verify(w), lambda _: right, says=right, dice=random.Random(seed))
        .run(auto(threads=threads), 400)
        .speed()
        for seed in range(3)
    ]
    assert statistics.mean(speeds) == pytest.approx(known, rel=0.06)
    assert (best == 0) == (known == 1.0)


@pytest.mark.parametrize(
    ("name", "least"),
    [("a cheap one that is mostly wrong", 0.98), ("a cheap one that thinks too well of itself", 0.96)],
)
def test_sixty_four_tokens_that_gain_nothing_take_the_time_of_plain_decoding(name, least):
    speeds = []
    for seed in range(12):
        world = WORLDS[name]()
        world.dice = random.Random(seed)
        speeds.append(world.run(auto(), 64).speed())
    assert statistics.mean(speeds) >= least


# ------------------------------------------------------------------------------------------- it follows what changes


def test_the_width_follows_the_clock_while_acceptance_is_unchanged():
    def seconds(width: int, now: int) -> float:
        return linear(1.1 if now < 150 or now >= 400 else 6.0, 0.01)(width)

    world = World(seconds, lambda _: 0.75, says=0.75).run(auto(), 600)
    assert world.width(50, 150) >= 6
    assert world.width(180, 400) == 0
    assert world.width(480, 600) >= 6, "what was dear once gets another try"


def test_a_load_on_the_machine_lowers_the_width():
    # What else runs takes the cycles that wide passes live on; narrow ones wait for memory anyhow.
    def seconds(width: int, now: int) -> float:
        return 1.0 + (0.02 if now < 200 else 0.5) * width

    world = World(seconds, lambda _: 0.8, says=0.8).run(auto(), 400)
    assert world.width(100, 200) >= 8
    assert world.width(230, 400) <= 3


def test_a_machine_that_slows_down_as_a_whole_changes_no_width_for_long():
    changed = []
    for seed in range(3):
        world = World(lambda w, now: (1 if now < 200 else 3) * linear(1.5, 0.02)(w), lambda _: 0.85, says=0.85)
        world.dice = random.Random(seed)
        world.run(auto(), 400)
        changed.append(abs(world.width(240, 400) - world.width(100, 200)))
    assert statistics.median(changed) <= 3


@pytest.mark.parametrize("says", [0.8, None], ids=["cheap", "dear"])
def test_it_falls_back_to_plain_decoding_and_comes_back(says):
    draft_s = (lambda depth: 1e-3) if says else (lambda depth: 0.05 * depth)

    def right(now: int) -> float:
        return 0.05 if 200 <= now < 500 else 0.85

    speeds = []
    for seed in range(3):
        world = World(lambda w, _: linear(1.6, 0.02)(w), right, draft_s=draft_s, says=says, dice=random.Random(seed))
        world.run(auto(), 800)
        assert world.width(100, 200) >= 4
        assert world.width(260, 500) == 0
        assert world.width(600, 800) >= 4
        speeds.append(world.speed(200, 500))
    assert statistics.mean(speeds) >= (0.94 if says else 0.9), "to notice takes some rounds"


def test_it_backs_off_as_the_batch_grows():
    widths = []
    for batch in (1, 2, 4, 8, 16):
        # Sixteen tokens a pass cost next to nothing, and what goes beyond is paid for.
        def seconds(width: int, now: int, batch: int = batch) -> float:
            return 1 + max(0, batch * (width + 1) - 16) / 16

        world = World(seconds, lambda _: 0.7, says=0.7, batch=batch).run(auto(batch), 300)
        widths.append(world.width(100))
        assert world.speed() >= 0.97 * batch / seconds(0, 0)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] >= 6
    assert widths[-1] == 0


# ------------------------------------------------------------------------------------------------------------- trees


def told(*log_seconds: float) -> Costs:
    """Frozen costs of one row, by rung."""
    costs = Costs()
    costs.passes(1, Platform()).mean[:] = log_seconds
    costs.frozen = True
    return costs


def tree(*nodes: tuple[int, int, float]) -> Draft:
    return Draft.of_nodes([nodes])


def test_of_a_tree_it_checks_the_nodes_that_are_likeliest_to_be_reached():
    costs = told(0.0, *[0.4] * 3, 0.41, *[3.0] * 8)  # up to four nodes are cheap
    controller = sg.Auto(costs=costs).start(Situation(batch=1))
    controller.depth(64)
    draft = tree((5, 0, 0.6), (6, 0, 0.3), (7, 1, 0.9), (8, 1, 0.05), (9, 2, 0.9), (4, 3, 0.9), (3, 5, 0.1))
    kept = controller.choose(draft)
    assert kept.tokens.tolist() == [[5, 6, 7, 4]]
    assert kept.parents.tolist() == [[0, 0, 1, 3]]
    assert not kept.is_chain


def test_nonsense_from_a_drafter_is_no_reason_to_stop():
    nan = float("nan")
    for confidence in [nan, nan, 0.9], [-0.5, 2.0, 0.3], [float("inf"), -float("inf"), nan]:
        controller = sg.Auto(costs=told(0.0, *[0.3] * 12)).start(Situation(batch=1))
        controller.depth(64)
        draft = Draft(torch.tensor([[5, 6, 7]]), torch.tensor([[0, -1, 2]]), confidence=torch.tensor([confidence]))
        kept = controller.choose(draft)
        assert kept.nodes <= 1, "what hangs on a place without a node is no node"
        controller.update(Step([[1]], [0], [0]))
        controller.update(Step([[5, 6]], [1], [1], 1, seconds=1.0))


def test_a_copy_of_costs_is_the_same_costs():
    costs = Costs()
    assert copy.deepcopy(sg.Auto(costs=costs)).costs is costs
    with pytest.raises(ValueError, match=r"is no hf_specgen\.Costs"):
        sg.Auto(costs={})


def test_what_must_stay_whole_is_checked_whole_or_not_at_all():
    costs = told(0.0, *[0.4] * 4, *[0.8] * 8)
    controller = sg.Auto(costs=costs).start(Situation(batch=1))
    for confidence, nodes in ((0.9, 8), (0.1, 0)):
        controller.depth(64)
        row = [(5, place, confidence) for place in range(8)]
        draft = Draft.of_nodes([row])
        draft = Draft(draft.tokens, draft.parents, confidence=draft.confidence, is_chain=True, whole=True)
        assert controller.choose(draft).nodes == nodes


def test_what_was_drawn_from_probabilities_is_not_cut_down():
    draft = tree((5, 0, 0.01), (6, 1, 0.01))
    for probs, kept in (None, 0), (torch.full((1, 2, 9), 1 / 9), 2):
        controller = sg.Auto(costs=told(0.0, *[0.3] * 12)).start(Situation(batch=1))
        controller.depth(64)
        assert controller.choose(replace(draft, probs=probs)).nodes == kept


# ------------------------------------------------------------------------------------------------------------- costs


def test_a_curve_learns_what_it_sees_and_tells_the_rest_from_it():
    curve = Curve([0.0] * len(LADDER))
    for _ in range(30):
        for width, seconds in ((0, 0.05), (8, 0.1)):
            curve.update(width, seconds)
    assert curve(0) == pytest.approx(0.05, rel=0.02)
    assert curve(8) == pytest.approx(0.1, rel=0.02)
    assert 0.07 < curve(6) < 0.11, "a neighbour moves along"
    assert curve.doubt(8) < curve.doubt(64)


def test_an_accident_of_the_machine_moves_a_curve_little():
    curve = Curve([0.0] * len(LADDER))
    for _ in range(30):
        curve.update(4, 0.1)
    curve.update(4, 5.0)
    assert curve(4) < 0.12


def test_costs_are_saved_and_loaded(tmp_path):
    costs = Costs()
    for width in (0, 4, 16):
        for _ in range(20):
            costs.learn(costs.passes(2, Platform()), width, 0.05 + 0.01 * width)
    costs.save(tmp_path / "costs.json")
    loaded = Costs.load(tmp_path / "costs.json")
    assert [loaded.passes(2, Platform())(width) for width in LADDER] == pytest.approx(
        [costs.passes(2, Platform())(w) for w in LADDER]
    )
    before = loaded.passes(2, Platform())(4)
    loaded.learn(loaded.passes(2, Platform()), 4, 9.0)
    assert loaded.passes(2, Platform())(4) == before, "frozen"
    learning = Costs.load(tmp_path / "costs.json", frozen=False)
    learning.learn(learning.passes(2, Platform()), 4, 9.0)
    assert learning.passes(2, Platform())(4) > before
    with pytest.raises(ValueError, match=r"frozen costs hold pass, batch 2, 1 threads, and not 'pass, batch 4"):
        loaded.passes(4, Platform())
    for text in "{}", "[]", "no JSON", '{"widths": [0]}', json.dumps({"widths": LADDER, "seconds": {"pass": [1.0]}}):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"was not written by Costs\.save"):
            Costs.load(tmp_path / "other.json")


def test_frozen_costs_make_every_choice_a_function_of_the_text():
    def widths(noise: float) -> list[int]:
        costs = told(0.0, *[0.7] * 12)
        world = World(lambda w, _: linear(2, 0.02)(w), lambda _: 0.8, says=0.8, noise=0.0)
        world.dice = random.Random(5)
        world.seconds = lambda width, now: linear(2, 0.02)(width) * (1 + noise * (now % 3))
        return world.run(auto(costs=costs), 100).widths

    assert widths(0.0) == widths(9.0)


def test_rows_that_have_ended_promise_nothing():
    costs = Costs()
    costs.passes(2, Platform()).mean[:] = [0.0, *[0.5] * 12]
    costs.frozen = True
    controller = sg.Auto(costs=costs).start(Situation(batch=2))
    controller.update(Step([[1], [1]], [0, 0], [0, 0]))
    chosen = []
    for tokens in [[5], [5]], [[5], []], [[5], []]:
        controller.depth(64)
        chosen.append(controller.choose(Draft.of_nodes([[(5, 0, 0.9)], []])).nodes)
        controller.update(Step(tokens, [0, 0], [0, 0], seconds=1.0))
    assert chosen == [0, 0, 1], "two rows do not pay for a draft of one of them; one row alone does"


def test_a_bushy_draft_of_a_dear_drafter_costs_its_nodes():
    costs = Costs()
    costs.passes(1, Platform()).mean[:] = [0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.9, *[2.0] * 5]
    costs.drafts("", 1, Platform()).mean[:] = [-2.0] * len(LADDER)
    costs.frozen = True
    depths = []
    for level in 1, 4:
        controller = sg.Auto(costs=costs, most=8).start(Situation(batch=1))
        controller.update(Step([[1]], [0], [0]))
        asked = controller.depth(64)
        draft = Draft.of_nodes([[(5, place // level * level, 0.9) for place in range(asked * level)]])
        controller.choose(Draft(draft.tokens, draft.parents))
        depths.append(controller.depth(64))
    assert depths[0] > depths[1]


def test_of_a_bushy_draft_only_what_is_checked_counts_against_its_depth():
    costs = Costs()
    costs.passes(1, Platform()).mean[:] = [0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.9, *[2.0] * 5]
    costs.drafts("", 1, Platform()).mean[:] = [-2.0] * len(LADDER)
    costs.frozen = True
    controller = sg.Auto(costs=costs, most=8).start(Situation(batch=1))
    controller.update(Step([[1]], [0], [0]))
    asked = controller.depth(64)
    # A sure path, and beside each of its nodes three that are hardly ever right.
    nodes = [(place, place - place % 4, 0.9 if place % 4 == 0 else 0.01) for place in range(4 * asked)]
    path = [0] + [1 + 4 * level for level in range(asked)]
    draft = Draft.of_nodes([[(token, path[place // 4], chance) for place, (token, _, chance) in enumerate(nodes)]])
    assert controller.choose(draft).nodes < draft.nodes
    assert controller.depth(64) == asked


def test_calls_of_one_model_share_what_they_learn():
    costs = Costs()
    world = WORLDS["a draft model that does not"]
    first, second = world().run(auto(costs=costs), 64), world().run(auto(costs=costs), 64)
    assert second.speed() >= first.speed()
    assert second.speed() >= 0.9


# -------------------------------------------------------------------------------------------------------- acceptance


def test_acceptance_starts_at_what_is_said_and_ends_at_what_is_seen():
    seen = Acceptance()
    assert seen.chance(3, 0.8) == pytest.approx(0.8)
    for _ in range(200):
        seen.fade()
        seen.saw(3, 0.8, False)
    assert seen.chance(3, 0.8) < 0.06
    assert seen.chance(5, 0.8) < 0.3, "one kind says something of the others"


# ------------------------------------------------------------------------------------------------------ what it may be


def test_what_a_length_may_be():
    assert as_length(None) == as_length("auto") == sg.Auto()
    assert as_length(4) == sg.Fixed(4)
    assert as_length(sg.Auto(most=3)).most == 3
    for wrong in (-1, 2.5, "5", object(), sg.Auto):
        with pytest.raises(ValueError, match="num_assistant_tokens is"):
            as_length(wrong)
    with pytest.raises(ValueError, match="most must be"):
        sg.Auto(most=0)


def test_a_token_of_the_room_is_the_target_s_own():
    assert within(5, [9, 3, 1, 0]) == (5, 2, 0, 0)
