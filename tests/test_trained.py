"""Trained heads of every kind alike: what they draw from, and how they fare where costs decide."""

from __future__ import annotations

import functools
from typing import Any

import heads
import pytest
import tiny
from transformers import PreTrainedModel

import hf_specgen as sg

METHODS = ["medusa", "eagle", "eagle3"]


@functools.cache
def target() -> PreTrainedModel:
    return sg.enable(tiny.llama())


@functools.cache
def drafter(method: str) -> Any:
    return heads.warm_of(target(), method)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_tokens_have_the_distribution_of_the_target(rule, method):
    """Report 43."""
    assert tiny.misfit(target(), drafter(method), rule, rows=4000) < tiny.FITS


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_another_q_than_was_drawn_from_would_show(rule, method):
    assert tiny.misfit(target(), heads.Misquoting(drafter(method)), rule, rows=4000) > tiny.FITS
