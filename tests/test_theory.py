"""The arithmetic of speculative decoding: published figures, limits, and a simulation of the process it describes."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specgen import theory
from hf_specgen.theory import Drafting, Machine, Model, Roofline, best_k, call_s, expected_tokens, speed_up

# SmolLM2-135M in float32, and a machine of 80 GFLOP/s and 18 GB/s; an 8B model in bfloat16, and an H100.
SMALL = Model(weights=135e6, weight_bytes=4, cache_bytes=2 * 30 * 3 * 64 * 4, attention_flops=4 * 30 * 9 * 64)
CPU = Machine(flops=80e9, bandwidth=18e9)
LARGE = Model(weights=8e9, weight_bytes=2, cache_bytes=2 * 32 * 8 * 128 * 2, attention_flops=4 * 32 * 32 * 128)
GPU = Machine(flops=989e12, bandwidth=3.35e12)


@pytest.mark.parametrize(
    ("acceptance", "k", "published"),
    [(0.9, 6, "5.2"), (0.8, 4, "3.4"), (0.7, 4, "2.77"), (0.5, 4, "1.9"), (0.3, 4, "1.4")],
)
def test_expected_tokens_are_the_published_ones(acceptance, k, published):
    digits = len(published.split(".")[1])
    assert f"{expected_tokens(acceptance, k):.{digits}f}" == published


def test_expected_tokens_are_those_of_the_process():
    acceptances, rounds, chance = [0.9, 0.5, 0.8, 0.2], 100_000, random.Random(1)
    decided = 0
    for _ in range(rounds):
        decided += 1
        for acceptance in acceptances:
            if chance.random() >= acceptance:
                break
            decided += 1
    assert decided / rounds == pytest.approx(expected_tokens(acceptances, 4), abs=0.02)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.999, 1.0])
def test_one_acceptance_is_the_same_at_every_depth(acceptance):
    for k in range(8):
        assert expected_tokens(acceptance, k) == pytest.approx(expected_tokens([acceptance] * 7, k))
    assert expected_tokens(acceptance, 0) == 1
    assert expected_tokens(1, 5) == 6


def test_a_token_behind_one_that_is_never_accepted_is_worth_nothing():
    assert expected_tokens([0.5, 0.0, 1.0], 3) == 1.5


def test_the_speed_up_is_the_papers():
    # Table 1 of arXiv 2211.17192: acceptance, k, and the factors of operations and of speed without a draft cost.
    for acceptance, k, speed in [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71)]:
        assert speed_up(acceptance, k) == pytest.approx(speed, abs=0.005)
    assert speed_up(0.9, 10) == pytest.approx(6.86, abs=0.005)
    # Half of the gain goes where the drafter takes as long as the rest of the round.
    assert speed_up(0.8, 5, draft=0.2) == pytest.approx(speed_up(0.8, 5) / 2)
    assert speed_up(0.8, 5, verify=lambda k: 1 + k / 5) == pytest.approx(speed_up(0.8, 5) / 2)


def test_the_best_length_follows_the_costs():
    assert best_k(0.9, most=20) == 20  # free tokens: as many as there may be
    assert best_k(0.9, draft=0.1) > best_k(0.6, draft=0.1) > best_k(0.6, draft=0.3) > 0
    assert best_k(0.5, draft=0.6) == 0  # E(0.5, 1) is 1.5 for 1.6
    assert best_k(0.0) == 0
    assert best_k([0.9, 0.9, 0.0, 0.9], draft=0.1) == 2
    cheap_to_eight = {k: 1.0 if k <= 8 else 4.0 for k in range(33)}
    assert best_k(0.95, verify=cheap_to_eight.__getitem__) == 8


def test_reading_the_weights_pays_for_some_tokens_and_arithmetic_bounds_the_rest():
    one = Roofline(SMALL, CPU)
    assert one.pass_s(1) == pytest.approx(0.03, rel=0.01)  # 540 MB at 18 GB/s
    assert one.verify(7) == 1.0
    assert one.verify(15) == pytest.approx(16 * 2 * 135e6 / 80e9 / 0.03)
    assert Roofline(SMALL, Machine(80e9, 18e9, launch_s=1.0)).verify(31) == pytest.approx(1.0, abs=0.1)


def test_drafts_shrink_as_the_batch_grows_and_long_contexts_bring_them_back():
    lengths = [best_k(0.8, draft=0.02, verify=Roofline(LARGE, GPU, batch).verify) for batch in (1, 32, 64, 128, 512)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 5
    assert lengths[-1] == 0
    assert best_k(0.8, draft=0.02, verify=Roofline(LARGE, GPU, 512, context=32_000).verify) > 5


def test_a_call_gains_less_the_longer_its_prompt_and_the_shorter_its_output():
    def gain(prompt, output, how=None):
        how = how or Drafting(0.8, 4)
        return call_s(SMALL, CPU, (prompt, output)) / call_s(SMALL, CPU, (prompt, output), how=how)

    assert gain(1, 100_000) == pytest.approx(speed_up(0.8, 4, verify=Roofline(SMALL, CPU, 1, 50_000).verify), rel=0.01)
    assert gain(100, 256) > gain(1000, 256) > gain(1000, 64) > gain(1000, 1) == 1.0
    assert gain(100, 256) > gain(100, 256, Drafting(0.8, 4, model=Model(20e6, 4))) > 1
    assert gain(100, 256, Drafting(0.8, 4, model=SMALL)) < 1
    assert call_s(SMALL, CPU, (100, 1)) == pytest.approx(Roofline(SMALL, CPU, context=50).pass_s(100))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (lambda: expected_tokens(1.1, 2), "1.1"),
        (lambda: expected_tokens([0.5, -0.1], 2), "-0.1"),
        (lambda: expected_tokens(0.5, -1), "k=-1"),
        (lambda: expected_tokens([0.5], 2), "1 depths"),
        (lambda: call_s(SMALL, CPU, (0, 5)), "lengths"),
    ],
)
def test_what_cannot_be_is_refused(asked, named):
    with pytest.raises(ValueError, match=named):
        asked()


def test_the_page_says_what_comes_out():
    page = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "hf_specgen.theory" in block)
    names, told = dict(vars(theory)), 0
    for line in block.splitlines():
        code, _, said = line.partition("  #")
        exec(code, names)
        if said:
            digits = len(said.split()[0].strip(";").partition(".")[2])
            assert f"{eval(code, names):.{digits}f}" == said.split()[0].strip(";")
            told += 1
    assert told == 4


def test_it_stands_without_torch():
    alone = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", alone, sys.modules["hf_specgen.theory"].__file__], check=True)
