"""What drafts promise, and what comes of it: the estimates behind the draft length "auto"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_specgen.draft import Draft, Node

# A confidence counts as so many observations of itself; observations keep this part of their weight from round to
# round, so that some twenty rounds are remembered.
PRIOR, MEMORY = 6.0, 0.95
# So many at most are remembered from one call to another: another text is another matter.
ANOTHER = 6.0
# Drafts are trusted by this much of what they promise, which counts as so many promised tokens.
AT_FIRST, PROMISES = 0.8, 3.0
# Drafts are alike if they promise as many tokens between two of these.
SIZES = (1.0, 2.0, 4.0)


class Acceptance:
    """How often drafted tokens are right, if their parents are, beside how often they were said to be.

    What was seen corrects all of a drafter's chances alike, and then those of a kind by themselves: a drafter that is
    too sure of itself in one respect is so in others.
    """

    def __init__(self) -> None:
        self._right: defaultdict[int, float] = defaultdict(float)
        self._seen: defaultdict[int, float] = defaultdict(float)
        self._all_right = self._all_said = PRIOR

    def chance(self, kind: int, said: float) -> float:
        """The chance that a token is right.

        Args:
            kind: tokens of a kind share what was seen of them.
            said: the chance as the drafter sees it.
        """
        prior = min(1.0, said * self._all_right / self._all_said)
        return (PRIOR * prior + self._right[kind]) / (PRIOR + self._seen[kind])

    def saw(self, kind: int, said: float, right: bool) -> None:
        """Takes note of a token whose parent was right."""
        self._right[kind] += right
        self._seen[kind] += 1
        self._all_right += right
        self._all_said += said

    def again(self) -> Acceptance:
        """What another text begins with: what was seen, if it was much for less."""
        begun = Acceptance()
        for mine, theirs in (self._right, begun._right), (self._seen, begun._seen):
            theirs.update(dict(mine))
        begun._all_right, begun._all_said = self._all_right, self._all_said
        begun.fade(ANOTHER / max([ANOTHER, *self._seen.values()]))
        return begun

    def fade(self, kept: float = MEMORY) -> None:
        """Lets what was seen count for less.

        Called once a round and not once a token: the tokens of one path stand and fall together, and a long one must
        not wipe out all that was seen before.
        """
        for counts in (self._right, self._seen):
            for kind in counts:
                counts[kind] *= kept
        self._all_right = PRIOR + kept * (self._all_right - PRIOR)
        self._all_said = PRIOR + kept * (self._all_said - PRIOR)


class Trust:
    """How many tokens drafts brought, beside how many they promised.

    Drafts are chosen for what they promise, and those that promise most are mostly too sure. So promises are compared
    with what came of them as a whole, those that were not taken up too.
    """

    def __init__(self) -> None:
        self._promised: defaultdict[int, float] = defaultdict(float)
        self._kept: defaultdict[int, float] = defaultdict(float)

    def __call__(self, promised: float) -> float:
        """Which part to expect of what a draft promises, if it promises so many tokens."""
        ratio = AT_FIRST
        # From the large down: who breaks large promises breaks small ones, but a lucky match is not yet a copy.
        for size in range(len(SIZES), _size(promised) - 1, -1):
            ratio = (PROMISES * ratio + self._kept[size]) / (PROMISES + self._promised[size])
        return ratio

    def saw(self, promised: float, kept: int) -> None:
        """Takes note of a draft that the text has decided on."""
        size = _size(promised)
        self._promised[size] = MEMORY * self._promised[size] + promised
        self._kept[size] = MEMORY * self._kept[size] + kept


def _size(promised: float) -> int:
    """Drafts that promise about as much."""
    return sum(promised >= bound for bound in SIZES)


def prunable(draft: Draft) -> bool:
    """Whether a draft's confidences may decide what is checked of it, and are at hand."""
    return draft.probs is None and draft.tokens.device.type == "cpu" and draft.confidence is not None


@dataclass
class Guess:
    """One row's draft on the host. Places count from 1; 0 is the root, and a parent of -1 marks a place without a node.

    Attributes:
        tokens, parents, confidence: as in `Draft`.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]

    @classmethod
    def rows(cls, draft: Draft) -> list[Guess]:
        """Each row of a draft, with its chances; 1 where these may not decide."""
        chances = draft.chances() if prunable(draft) else None
        confidence = chances or [[1.0] * draft.nodes] * len(draft.tokens)
        rows = zip(draft.tokens.tolist(), draft.parents.tolist(), confidence, strict=True)
        return [cls(*row) for row in rows]

    @cached_property
    def below(self) -> dict[int, list[int]]:
        """The places below each place that has any."""
        places: dict[int, list[int]] = {}
        for place, parent in enumerate(self.parents, 1):
            if parent >= 0:
                places.setdefault(parent, []).append(place)
        return places

    def likeliest(self, chance: Callable[[float], float]) -> list[tuple[float, int]]:
        """The chance that the walk comes by, and the place; the likeliest first, and so parents before children.

        Args:
            chance: that a token is right if its parent is, by its confidence.
        """
        reach = {0: 1.0}  # of places that hang on the root
        for place, (parent, confidence) in enumerate(zip(self.parents, self.confidence, strict=True), 1):
            if parent in reach:
                reach[place] = reach[parent] * min(chance(confidence), 1.0)
        return sorted(((reach[place], place) for place in reach if place), key=lambda node: (-node[0], node[1]))

    def part(self, places: Sequence[int]) -> list[Node]:
        """These places and no others; the parent of each must be among them."""
        moved = {0: 0}
        nodes: list[Node] = []
        for place in sorted(places):
            parent = moved[self.parents[place - 1]]
            nodes.append((self.tokens[place - 1], parent, self.confidence[place - 1]))
            moved[place] = len(nodes)
        return nodes

    def among(self, nodes: Sequence[Node]) -> int:
        """How many of its tokens others drafted too, after the same tokens."""
        stands = {(parent, token): place for place, (token, parent, _) in enumerate(nodes, 1)}
        found = {0: 0}
        for place, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            if parent in found and (stand := stands.get((found[parent], token))):
                found[place] = stand
        return len(found) - 1


class Watched:
    """A draft, and how far the text has followed it since.

    Args:
        promised: tokens.
        nodes: of it.

    Attributes:
        kept: tokens so far that it had right.
        over: the text has left it, or come to its end.
    """

    def __init__(self, promised: float, nodes: Sequence[Node]) -> None:
        self.promised = promised
        self.kept = 0
        self._stand = 0
        self._below: dict[int, dict[int, int]] = {}
        for place, (token, parent, _) in enumerate(nodes, 1):
            self._below.setdefault(parent, {}).setdefault(token, place)
        self.over = not self._below.get(0)

    def follow(self, tokens: Sequence[int]) -> list[bool]:
        """Goes along with new tokens: for each that it has a guess for whether that was right; the last may be not."""
        right: list[bool] = []
        for token in tokens:
            if self.over:
                break
            child = self._below[self._stand].get(token)
            right.append(child is not None)
            if child is not None:
                self._stand, self.kept = child, self.kept + 1
            self.over = child is None or child not in self._below
        return right
