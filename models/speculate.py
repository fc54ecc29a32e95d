"""Drafts for speculative decoding: what followed the last time, by n-gram look-up.

Text often repeats itself: code, summaries, answers that quote the question. The tokens that
followed the present n-gram where it stood before are a guess that costs nothing; the engine feeds
it together with the last token and keeps what the model agrees with (`engine_step.step`). The idea
is prompt look-up decoding (Saxena, 2023).
"""

from collections.abc import Sequence

import numpy as np

LONGEST, SHORTEST = 3, 1  # n-grams that are looked up


def look_up(tokens: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens that followed the last place where the end of `tokens` stood before.

    Longer ends go first: 3 tokens, then 2, then 1. Nothing is found if even the last token is new.

    >>> look_up([1, 2, 3, 9, 1, 2, 3], 2), look_up([1, 2, 3], 2), look_up([7, 7], 4)
    ([9, 1], [], [7])
    """
    text = np.asarray(tokens, np.int32)
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        places = np.flatnonzero((windows == text[-size:]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            return text[start : start + most].tolist()
    return []
