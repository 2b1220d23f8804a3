"""Keyed noise is good noise and a pure function of its place; processors are what the lists say they are."""

import copy
import inspect

import pytest
import torch
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from hf_specgen import sampling
from hf_specgen.sampling import PURE, SEPARABLE, Noise, Processors, fresh_seed

MASK = (1 << 64) - 1
VOCAB = 160
EOS = 7


def noise(seeds=0, rows=1, n=1, start=0):
    """Noise bound to `n` positions a row."""
    return Noise.of(seeds, rows, "cpu").at(torch.arange(start, start + n).expand(rows, n))


def uniforms(bound, vocab):
    """`(batch, n, vocab)` in (0, 1): Gumbel noise undone."""
    gumbel = bound.perturb(torch.zeros(*bound.positions.shape, vocab))
    return (-(-gumbel).exp()).exp()


def chance(counts, expected):
    """Of a chi-square as large as this: a right sampler falls below 1e-6 with one seed in a million."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


# Each axis on its own: 2**16 numbers that differ in nothing else.
AXES = {
    "tokens": lambda: uniforms(noise(3), 1 << 16),
    "positions": lambda: uniforms(noise(3, n=1 << 16), 1),
    "uniform over positions": lambda: noise(3, n=1 << 16).uniform(),
    "rows": lambda: noise(3, rows=1 << 16).uniform(),
    "seeds": lambda: noise(range(1 << 16), rows=1 << 16).uniform(),
    "roots": lambda: noise([5] * (1 << 16), rows=1 << 16).stream("accept", torch.arange(1 << 16)).uniform(),
    "streams": lambda: torch.stack(
        [noise(3, n=1 << 14).uniform()]
        + [noise(3, n=1 << 14).stream(name).uniform() for name in ("draft", "accept", "residual")],
        dim=-1,
    ),
}


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_and_neighbours_are_independent(axis):
    numbers = AXES[axis]().flatten()
    assert numbers.numel() == 1 << 16
    counts = torch.bincount((numbers * 256).long(), minlength=256)
    assert chance(counts, torch.full((256,), 256.0)) > 1e-6
    for gap in (1, 2):
        pair = (numbers[:-gap] * 16).long() * 16 + (numbers[gap:] * 16).long()
        assert chance(torch.bincount(pair, minlength=256), torch.full((256,), len(pair) / 256)) > 1e-6
        # The correlation of n independent pairs is normal with deviation n ** -0.5: five of them, one in 1.7 million.
        correlation = torch.corrcoef(torch.stack([numbers[:-gap], numbers[gap:]]))[0, 1]
        assert abs(float(correlation)) < 5 * len(pair) ** -0.5


def test_no_two_places_share_noise():
    bound = noise(1, rows=20, n=50)
    many = [bound, *(bound.stream(name) for name in ("draft", "accept", "residual"))]
    many += [noise(1, rows=20, n=50).stream("accept", torch.full((20,), root)) for root in range(1, 4)]
    numbers = torch.cat([torch.cat([x.uniform().flatten(), uniforms(x, 16).flatten()]) for x in many])
    # 119,000 of 2**52 values: a coincidence once in 600,000.
    assert len(numbers.unique()) == len(numbers)


def test_the_largest_of_scores_plus_noise_is_a_draw_from_their_softmax():
    scores = torch.tensor([2.0, -1.0, 0.5, 0.0, -torch.inf, 1.0])
    bound = noise(11, rows=300, n=400)
    chosen = bound.argmax(scores.expand(300, 400, 6))
    counts = torch.bincount(chosen.flatten(), minlength=6)
    assert counts[4] == 0
    seen = torch.tensor([0, 1, 2, 3, 5])
    assert chance(counts[seen], scores.softmax(-1)[seen] * chosen.numel()) > 1e-6


def reference(seed, row, position, counter, stream=None, root=None):
    """The hash in plain integers, up to the uniform: what every device has to reproduce."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    key = mix((sampling._fold(seed) + (row + 1) * step) & MASK)
    if stream is not None:
        key = mix((mix((key + sampling._STREAMS[stream]) & MASK) + root * step) & MASK)
    node = mix((key + position * step) & MASK)
    return (mix((node + counter * step) & MASK) >> 11 | 1) * 2.0**-53


def test_the_hash_is_the_documented_one():
    bound = Noise.of(-5, 3, "cpu").at(torch.tensor([[0, 9], [4, 1 << 40], [3, 3]]))
    for row, positions in enumerate(bound.positions.tolist()):
        for n, position in enumerate(positions):
            assert bound.uniform()[row, n] == reference(-5, row, position, 0)
            assert bound.stream("residual").uniform()[row, n] == reference(
                -5, row, position, 0, "residual", positions[0]
            )
            expected = torch.tensor(
                [reference(-5, row, position, token + 1) for token in range(9)], dtype=torch.float64
            )
            assert torch.equal(bound.perturb(torch.zeros(3, 2, 9))[row, n], -(-expected.log()).log())


def test_uniforms_never_reach_0_or_1():
    bits = torch.tensor([0, -1, 1, 1 << 62, -(1 << 63)])
    numbers = sampling._uniform(bits)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert (-(-numbers.log()).log()).isfinite().all()


def test_a_seed_may_be_any_integer():
    seeds = [0, -1, 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 64), (1 << 64) + 1, 10**40, -(10**40)]
    assert len({float(noise(seed).uniform()) for seed in seeds}) == len(seeds)


def test_one_seed_a_row_gives_each_row_the_text_of_row_0():
    alone = noise(7, n=4).uniform()
    assert torch.equal(noise([7, 7], rows=2, n=4).uniform(), alone.expand(2, 4))
    assert torch.equal(noise([9, 7], rows=2, n=4).uniform()[1:], alone)
    assert not torch.equal(noise(7, rows=2, n=4).uniform()[1:], alone)


def test_rows_keep_their_noise_in_any_company():
    bound = noise(5, rows=4, n=3, start=6).stream("accept")
    some = bound.rows([3, 1])
    assert torch.equal(some.uniform(), bound.uniform()[[3, 1]])
    assert torch.equal(some.root, bound.root[[3, 1]])
    unbound = Noise.of(5, 4, "cpu").rows([2])
    assert torch.equal(unbound.at(torch.tensor([[6, 7, 8]])).uniform(), noise(5, rows=4, n=3, start=6).uniform()[2:3])


def test_node_and_where_pick_places_and_keys():
    bound = noise(5, rows=3, n=4)
    index = torch.tensor([2, 0, 3])
    assert torch.equal(bound.node(index).uniform(), bound.uniform().gather(1, index[:, None]))
    mask = torch.tensor([True, False, True])
    mixed = bound.stream("residual").where(mask, bound)
    assert torch.equal(mixed.uniform(), bound.stream("residual").uniform().where(mask[:, None], bound.uniform()))


def test_a_stream_belongs_to_a_round():
    unbound = Noise.of(0, 2, "cpu")
    with pytest.raises(ValueError, match="root"):
        unbound.stream("draft")
    positions = torch.tensor([[4, 5], [8, 9]])
    by_default = unbound.at(positions).stream("draft").uniform()
    assert torch.equal(unbound.stream("draft", torch.tensor([4, 8])).at(positions).uniform(), by_default)
    # One place at a time, as the lazy walk asks, and all at once.
    later = unbound.at(positions[:, 1:], root=positions[:, 0]).stream("draft")
    assert torch.equal(later.uniform(), by_default[:, 1:])
    assert not torch.equal(unbound.at(positions).stream("draft", torch.tensor([3, 7])).uniform(), by_default)


def test_wrong_seeds_and_devices_are_named():
    with pytest.raises(ValueError, match="2 integers for 3 rows"):
        Noise.of([1, 2], 3, "cpu")
    with pytest.raises(TypeError):
        Noise.of(1.5, 3, "cpu")
    with pytest.raises(ValueError, match="mps"):
        Noise.of(1, 3, "mps")
    with pytest.raises(ValueError, match="mps"):
        Noise.of(1, 3, "cpu").to("mps")
    with pytest.raises(ValueError, match="bound"):
        Noise.of(1, 3, "cpu").uniform()


def sparse_scores(kept):
    """Nodes of a few, all and no finite scores, a tie of them among the rest."""
    torch.manual_seed(0)
    scores = torch.randn(3, 5, 1000)
    scores[scores < scores.topk(kept, dim=-1).values[..., -1:]] = -torch.inf
    scores[1, 2] = -torch.inf
    scores[2, 0, :] = -torch.inf
    scores[2, 0, 999] = 1.0
    return scores


@pytest.mark.parametrize("kept", [1, 50, 249, 251, 1000])
@pytest.mark.parametrize("chunk", [1, 4096, 1 << 20])
def test_argmax_is_that_of_perturb_however_it_is_computed(kept, chunk, monkeypatch):
    scores, bound = sparse_scores(kept), noise(2, rows=3, n=5)
    whole = bound.perturb(scores)
    assert torch.equal(whole == -torch.inf, scores == -torch.inf)
    monkeypatch.setattr(sampling, "_CPU_CHUNK", chunk)
    assert torch.equal(bound.perturb(scores), whole)
    assert torch.equal(bound.argmax(scores), whole.argmax(-1))
    monkeypatch.setattr(sampling, "_SPARSE", 10**9)  # never sparse
    assert torch.equal(bound.argmax(scores), whole.argmax(-1))


def test_only_finite_scores_are_hashed_on_the_cpu(monkeypatch):
    hashed = []
    plain = sampling._gumbel
    monkeypatch.setattr(sampling, "_gumbel", lambda state, counter: hashed.append(plain(state, counter)) or hashed[-1])
    noise(2, rows=3, n=5).argmax(sparse_scores(50))
    assert sum(part.numel() for part in hashed) == 13 * 50 + 1


def test_smallest_shapes():
    assert torch.equal(noise(0).argmax(torch.zeros(1, 1, 1)), torch.zeros(1, 1, dtype=torch.long))
    assert torch.equal(noise(0).argmax(torch.full((1, 1, 3), -torch.inf)), torch.zeros(1, 1, dtype=torch.long))


def test_scores_are_not_written():
    scores = torch.randn(2, 3, 40, dtype=torch.float64)
    before = scores.clone()
    noise(0, rows=2, n=3).perturb(scores)
    noise(0, rows=2, n=3).argmax(scores)
    assert torch.equal(scores, before)


def test_nothing_is_read_back_from_a_device():
    # On the meta device there is nothing to read: any attempt raises.
    bound = Noise.of(1, 2, "meta").at(torch.zeros(2, 3, dtype=torch.long, device="meta"))
    scores = torch.zeros(2, 3, 50, device="meta")
    assert bound.argmax(scores).shape == (2, 3)
    assert bound.stream("draft").perturb(scores).dtype == torch.float64
    assert bound.uniform().shape == (2, 3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_is_the_same_on_a_gpu():
    here = noise(5, rows=3, n=4)
    there = here.to("cuda")
    assert torch.equal(there.uniform().cpu(), here.uniform())
    scores = torch.randn(3, 4, 5000)
    assert torch.allclose(there.perturb(scores.cuda()).cpu(), here.perturb(scores), rtol=1e-14, atol=1e-14)
    assert torch.equal(there.argmax(scores.cuda()).cpu(), here.argmax(scores))


def test_fresh_seeds_come_from_the_default_generator_and_noise_does_not():
    torch.manual_seed(3)
    first, second = fresh_seed(), fresh_seed()
    torch.manual_seed(3)
    assert (fresh_seed(), fresh_seed()) == (first, second)
    assert first != second
    before = torch.random.get_rng_state()
    noise(first, rows=2, n=2).argmax(torch.zeros(2, 2, 9))
    assert torch.equal(torch.random.get_rng_state(), before)


# Processors. Each maker is called with the lengths of the rows' padding.
MAKERS = {
    stock.TemperatureLogitsWarper: lambda padding: stock.TemperatureLogitsWarper(0.7),
    stock.TopKLogitsWarper: lambda padding: stock.TopKLogitsWarper(20),
    stock.TopPLogitsWarper: lambda padding: stock.TopPLogitsWarper(0.8),
    stock.MinPLogitsWarper: lambda padding: stock.MinPLogitsWarper(0.1, min_tokens_to_keep=2),
    stock.TopHLogitsWarper: lambda padding: stock.TopHLogitsWarper(0.5),
    stock.TypicalLogitsWarper: lambda padding: stock.TypicalLogitsWarper(0.6),
    stock.EpsilonLogitsWarper: lambda padding: stock.EpsilonLogitsWarper(0.01),
    stock.EtaLogitsWarper: lambda padding: stock.EtaLogitsWarper(0.1),
    stock.SuppressTokensLogitsProcessor: lambda padding: stock.SuppressTokensLogitsProcessor([3, EOS]),
    stock.InfNanRemoveLogitsProcessor: lambda padding: stock.InfNanRemoveLogitsProcessor(),
    stock.LogitNormalization: lambda padding: stock.LogitNormalization(),
    stock.BarkEosPrioritizerLogitsProcessor: lambda padding: stock.BarkEosPrioritizerLogitsProcessor(EOS, 0.00003),
    stock.RepetitionPenaltyLogitsProcessor: lambda padding: stock.RepetitionPenaltyLogitsProcessor(
        1.5, prompt_ignore_length=torch.tensor(padding)
    ),
    stock.NoRepeatNGramLogitsProcessor: lambda padding: stock.NoRepeatNGramLogitsProcessor(2),
    stock.SequenceBiasLogitsProcessor: lambda padding: stock.SequenceBiasLogitsProcessor(
        {(1,): 3.0, (1, 2): -4.0, (0, 1): 2.0, (2, 1): 1.0, (1, 2, 0): 5.0}
    ),
    stock.NoBadWordsLogitsProcessor: lambda padding: stock.NoBadWordsLogitsProcessor([[1, 2], [4], [EOS]], EOS),
    stock.MinLengthLogitsProcessor: lambda padding: stock.MinLengthLogitsProcessor(9, EOS),
    stock.MinNewTokensLengthLogitsProcessor: lambda padding: stock.MinNewTokensLengthLogitsProcessor(6, 3, EOS),
    stock.ForcedBOSTokenLogitsProcessor: lambda padding: stock.ForcedBOSTokenLogitsProcessor(2),
    stock.ForcedEOSTokenLogitsProcessor: lambda padding: stock.ForcedEOSTokenLogitsProcessor(10, EOS),
    stock.ExponentialDecayLengthPenalty: lambda padding: stock.ExponentialDecayLengthPenalty((2, 1.2), EOS, 6),
    stock.SuppressTokensAtBeginLogitsProcessor: lambda padding: stock.SuppressTokensAtBeginLogitsProcessor([5, 6], 8),
}

# Neither pure nor separable, and why.
REST = {
    "LogitsProcessor": "abstract",
    "EncoderRepetitionPenaltyLogitsProcessor": "holds the prompts of all rows",
    "EncoderNoRepeatNGramLogitsProcessor": "holds the prompts of all rows",
    "PrefixConstrainedLogitsProcessor": "a user's function, told the row's number",
    "ClassifierFreeGuidanceLogitsProcessor": "twice as many rows as prompts",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "keeps a cache",
    "WatermarkLogitsProcessor": "draws from a generator of its own",
    "SynthIDTextWatermarkLogitsProcessor": "counts its calls",
    "WhisperTimeStampLogitsProcessor": "speech",
    "WhisperNoSpeechDetection": "speech",
    "AlternatingCodebooksLogitsProcessor": "audio",
    "DiaClassifierFreeGuidanceLogitsProcessor": "audio",
    "DiaEOSChannelFilterLogitsProcessor": "audio",
    "DiaEOSDelayPatternLogitsProcessor": "audio",
}


def named(kind):
    return kind.__name__


def prefixes(length, rows=4):
    """Few different ids, so that n-grams repeat; the rows have 0, 1, 2, ... ids of padding on the left."""
    ids = torch.randint(0, 3, (rows, length), generator=torch.Generator().manual_seed(length))
    padding = list(range(rows))
    for row, count in enumerate(padding):
        ids[row, :count] = EOS
    return ids, padding


def random_scores(*shape):
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(8)) * 3


def test_every_stock_processor_is_judged():
    kinds = {
        kind
        for _, kind in inspect.getmembers(stock, inspect.isclass)
        if issubclass(kind, LogitsProcessor) and kind.__module__ == stock.__name__
    }
    known = set(PURE) | set(SEPARABLE)
    assert set(MAKERS) == known
    assert not set(PURE) & set(SEPARABLE)
    assert {kind.__name__ for kind in kinds - known} == set(REST), "a new processor: pure, separable, or neither?"


@pytest.mark.parametrize("kind", PURE, ids=named)
def test_pure_processors_look_at_one_row_of_scores_only(kind):
    processor, scores = MAKERS[kind]([]), random_scores(6)
    scores[:, 3] = -torch.inf
    ids, _ = prefixes(8, rows=6)
    result = processor(ids, scores.clone())
    assert not torch.equal(result, scores)
    assert torch.equal(processor(torch.empty(6, 0, dtype=torch.long), scores.clone()), result)
    order = torch.tensor([4, 0, 4, 5])
    assert torch.equal(processor(ids[order], scores[order]), result[order])


@pytest.mark.parametrize("kind", PURE, ids=named)
def test_warping_all_nodes_is_warping_each(kind):
    scores = random_scores(3, 4)
    scores[0, 1, :150] = -torch.inf
    processors = Processors([MAKERS[kind]([])])
    together = processors.warp(scores.clone())
    assert together.shape == scores.shape
    for node in range(4):
        assert torch.equal(processors(prefixes(5, rows=3)[0], scores[:, node].clone()), together[:, node])


@pytest.mark.parametrize("kind", SEPARABLE, ids=named)
def test_separable_processors_show_each_row_what_the_batch_shows_it(kind):
    acted = False
    for length in (1, 5, 7, 8, 9, 12):
        ids, padding = prefixes(length)
        processors = Processors([MAKERS[kind](padding)])
        scores = random_scores(4)
        together = processors(ids, scores.clone())
        acted |= not torch.equal(together, scores)
        for row in range(4):
            alone = processors.row(row)
            # What it was shown before, and for whom, leaves nothing behind.
            alone(prefixes(6)[0][row : row + 1], random_scores(1))
            assert torch.equal(alone(ids[row : row + 1], scores[row : row + 1].clone()), together[row : row + 1])
        assert torch.equal(processors(ids, scores.clone()), together)
    assert acted


def test_no_known_processor_writes_into_what_it_is_given():
    for kind, make in MAKERS.items():
        for length in (1, 8, 9, 12):
            ids, padding = prefixes(length)
            scores = random_scores(4)
            make(padding)(ids, scores)
            assert torch.equal(scores, random_scores(4)), kind


def test_lists_know_what_they_are():
    warper, penalty = stock.TopKLogitsWarper(5), stock.RepetitionPenaltyLogitsProcessor(1.2)

    class Mine(stock.TopKLogitsWarper):
        """May do anything."""

    def facts(*members):
        processors = Processors(LogitsProcessorList(members))
        return processors.pure, processors.separable, processors.empty

    assert facts() == (True, True, True)
    assert facts(warper) == (True, True, False)
    assert facts(warper, penalty) == (False, True, False)
    assert facts(warper, Mine(5)) == (False, False, False)
    with pytest.raises(ValueError, match="pure"):
        Processors([penalty]).warp(torch.zeros(1, 1, 9))


def test_a_list_runs_as_stock_runs_it():
    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores + self.calls

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores, more):
            return scores

    ids, padding = prefixes(8)
    known = [make(padding) for make in MAKERS.values()]
    members = [*known[:15], Counting(), *known[15:]]
    expected = LogitsProcessorList(copy.deepcopy(members))(ids, random_scores(4))
    assert torch.equal(Processors(members)(ids, random_scores(4)), expected)
    assert torch.equal(Processors(known)(ids, random_scores(4)), LogitsProcessorList(known)(ids, random_scores(4)))
    with pytest.raises(ValueError, match="required parameters"):
        Processors([Asking()])(ids, random_scores(4))


def test_drafters_get_their_own_copies_of_what_they_may_run():
    bias = MAKERS[stock.SequenceBiasLogitsProcessor]([])
    padded = stock.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([0, 8]))
    skipping = stock.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)
    watermark = stock.WatermarkLogitsProcessor(VOCAB, "cpu")
    warper = stock.TemperatureLogitsWarper(0.7)
    members = [watermark, bias, padded, skipping, warper]
    ids, scores = prefixes(8, rows=2)[0], random_scores(2)
    bias(ids, scores)
    before = [dict(vars(member)) for member in members]
    drafts = Processors(members).for_drafts()
    assert drafts.separable
    assert not drafts.pure
    # A smaller vocabulary than the one the target's processor has settled on.
    assert drafts(ids, scores[:, :100].clone()).shape == (2, 100)
    expected = stock.RepetitionPenaltyLogitsProcessor(1.5)(ids, bias(ids, scores))
    expected = warper(ids, skipping(ids, expected))
    assert torch.equal(Processors(members).for_drafts()(ids, scores.clone()), expected)
    assert [dict(vars(member)) for member in members] == before
    assert Processors([watermark]).for_drafts().empty


def test_rows_and_devices_get_copies():
    ids, padding = prefixes(8)
    members = [make(padding) for make in MAKERS.values()]
    processors = Processors(members)
    before = [dict(vars(member)) for member in members]
    processors.row(1)
    moved = processors.to("meta")
    assert all(vars(member).keys() == old.keys() for member, old in zip(members, before, strict=True))
    assert all(vars(member)[k] is old[k] for member, old in zip(members, before, strict=True) for k in old)
    held = [value for member in moved._processors for value in vars(member).values() if torch.is_tensor(value)]
    assert len(held) >= 7
    assert all(value.device.type == "meta" for value in held)
    assert torch.equal(processors.to("cpu")(ids, random_scores(4)), processors(ids, random_scores(4)))
