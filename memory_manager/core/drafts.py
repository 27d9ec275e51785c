"""The draft index of one namespace: what followed the last time a sequence's latest tokens occurred.

Texts (prompts with their outputs) stand behind each other in a ring of tokens, the oldest overwritten first.
Every run of MIN_MATCH tokens is chained to the run of the same hash before it. A draft comes from the
occurrences that match the longest suffix; where they go on differently, the most frequent continuation wins.
Places are counted from the first token ever written; a place's slot is its remainder by the ring's size.
"""

from typing import NamedTuple

import numpy as np

from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import Array

MIN_MATCH = 4
MAX_MATCH = 64
MAX_CANDIDATES = 16
# Stands between texts; no token equals it.
BOUNDARY = -1

MIN_SIZE = 256
# Runs looked at before the search ends, most of which may only share a hash.
_MAX_VISITS = 256
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class DraftRing(NamedTuple):
    """C slots, a power of two; 20 bytes each."""

    tokens: Array  # int32[C]
    previous: Array  # int64[C], place of the run before with the same hash; -1 for none
    latest: Array  # int64[C], by hash: place of the latest run's last token; -1 for none
    num_written: Array  # int64[1]


def new_ring(num_slots: int) -> DraftRing:
    return DraftRing(
        np.full(num_slots, BOUNDARY, np.int32),
        np.full(num_slots, -1, np.int64),
        np.full(num_slots, -1, np.int64),
        np.zeros(1, np.int64),
    )


def texts_of(ring: DraftRing) -> Array:
    """int32[n]: all tokens in the ring, each text with the BOUNDARY behind it, oldest first."""
    size, num_written = ring.tokens.size, int(ring.num_written[0])
    if num_written < size:
        return ring.tokens[:num_written].copy()
    return np.roll(ring.tokens, -(num_written % size))


@kernel
def remember(ring: DraftRing, texts: Array) -> None:
    """Appends texts, each with the BOUNDARY behind it; of one longer than the ring only the end."""
    mask = ring.tokens.size - 1
    place = ring.num_written[0]
    run = 0
    for i in range(max(0, texts.size - ring.tokens.size), texts.size):
        slot = place & mask
        ring.tokens[slot] = texts[i]
        ring.previous[slot] = -1
        run = 0 if texts[i] == BOUNDARY else run + 1
        if run >= MIN_MATCH:
            bucket = _bucket(ring, texts, i + 1)
            ring.previous[slot] = ring.latest[bucket]
            ring.latest[bucket] = place
        place += 1
    ring.num_written[0] = place


@inner
def _bucket(ring: DraftRing, tokens: Array, end: int) -> np.int64:
    """Of the MIN_MATCH tokens before `end`."""
    mixed = np.uint64(0)
    for i in range(end - MIN_MATCH, end):
        mixed = (mixed ^ np.uint64(tokens[i])) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(ring.latest.size - 1))


@inner
def draft(ring: DraftRing, suffix: Array, max_tokens: int, out: Array) -> int:
    """Writes a draft of at most `max_tokens` and of at most as many tokens as were matched; its length.

    suffix: the last tokens of a sequence, MAX_MATCH of them are looked at.
    """
    if suffix.size < MIN_MATCH:
        return 0
    mask = ring.tokens.size - 1
    places = np.empty(MAX_CANDIDATES, np.int64)
    count, matched = _find(ring, suffix, places)
    num_drafted = 0
    while num_drafted < min(max_tokens, matched):
        token = ring.tokens[(places[0] + 1) & mask] if count == 1 else _vote(ring, places, count)
        if token == BOUNDARY:
            break
        out[num_drafted] = token
        num_drafted += 1
        agreeing = 0
        for i in range(count):
            if ring.tokens[(places[i] + 1) & mask] == token:
                places[agreeing] = places[i] + 1
                agreeing += 1
        count = agreeing
    return num_drafted


@inner
def _find(ring: DraftRing, suffix: Array, places: Array) -> tuple[int, int]:
    """Fills `places` with the occurrences of the longest match, latest first: their number and its length.

    Of the runs that match at all, the latest MAX_CANDIDATES are compared.
    """
    count = num_candidates = 0
    best = MIN_MATCH
    place = ring.latest[_bucket(ring, suffix, suffix.size)]
    oldest = max(0, ring.num_written[0] - ring.tokens.size)
    for _ in range(_MAX_VISITS):
        if place < oldest or num_candidates == MAX_CANDIDATES:
            break
        length = _match_length(ring, suffix, place, oldest)
        num_candidates += length >= MIN_MATCH
        if length > best:
            count, best = 0, length
        if length == best:
            places[count] = place
            count += 1
        place = ring.previous[place & (ring.tokens.size - 1)]
    return count, best


@inner
def _match_length(ring: DraftRing, suffix: Array, place: int, oldest: int) -> int:
    """How many tokens up to `place` equal the end of the suffix."""
    mask = ring.tokens.size - 1
    limit = min(MAX_MATCH, min(suffix.size, place - oldest + 1))
    length = 0
    while length < limit and ring.tokens[(place - length) & mask] == suffix[suffix.size - 1 - length]:
        length += 1
    return length


@inner
def _vote(ring: DraftRing, places: Array, count: int) -> int:
    """The most frequent token that follows the places, of equals the latest; BOUNDARY when nothing does."""
    mask = ring.tokens.size - 1
    winner, most = BOUNDARY, 0
    for i in range(count):
        if 2 * most >= count:
            break
        token = ring.tokens[(places[i] + 1) & mask]
        if token == BOUNDARY:
            continue
        votes = 0
        for j in range(i, count):
            votes += ring.tokens[(places[j] + 1) & mask] == token
        if votes > most:
            winner, most = token, votes
    return winner
