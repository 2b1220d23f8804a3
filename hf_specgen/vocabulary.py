"""Do two models mean the same by a token id?"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Embedding tables are padded to round sizes, so that siblings of one family differ by less than this.
LARGEST_PADDING = 1024


def size(model: PreTrainedModel) -> int:
    """Rows of the model's embedding table, padding included."""
    return int(model.config.get_text_config().vocab_size)


def compare(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
) -> str:
    """Compares two vocabularies: token by token where both tokenizers are known, else by size.

    Args:
        target: the target.
        drafter: the drafter.
        tokenizer: the target's tokenizer.
        drafter_tokenizer: the drafter's tokenizer.

    Returns:
        The verdict in words.

    Raises:
        ValueError: they differ; the message names the first id on which they do, or the two sizes.
    """
    ours, theirs = size(target), size(drafter)
    if tokenizer is not None and drafter_tokenizer is not None:
        return _compare_tokens(tokenizer, drafter_tokenizer)
    if abs(ours - theirs) >= LARGEST_PADDING:
        raise ValueError(
            f"the target has {ours} token ids and the drafter {theirs}: they cannot share a vocabulary. "
            "If they do, pass tokenizer= and assistant_tokenizer= to have them compared token by token"
        )
    return f"{ours} and {theirs} token ids: not verified (pass tokenizer= and assistant_tokenizer= to compare)"


def _compare_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str:
    first, second = _by_id(ours), _by_id(theirs)
    special = {*ours.added_tokens_decoder, *theirs.added_tokens_decoder}
    differing = [i for i in sorted(first.keys() & second.keys()) if first[i] != second[i]]
    grave = [i for i in differing if i not in special]
    if grave:
        i = grave[0]
        raise ValueError(
            f"the two vocabularies differ: id {i} is {first[i]!r} for the target and {second[i]!r} for the drafter "
            f"({len(grave)} ids differ in all)"
        )
    unshared = [i for i in sorted(first.keys() ^ second.keys()) if i not in special]
    if unshared:
        i = unshared[0]
        whose, token = ("target", first[i]) if i in first else ("drafter", second[i])
        raise ValueError(f"the two vocabularies differ: only the {whose} knows id {i}, {token!r}")
    if differing or first.keys() != second.keys():
        logger.warning("the vocabularies are equal but for special tokens; drafts that use those are lost")
        return "equal but for special tokens"
    return "equal, token by token"


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}
