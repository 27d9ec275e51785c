"""The draft index: what followed the last time a sequence's latest tokens occurred, in its own namespace.

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
MAX_MATCH = 32
MAX_CANDIDATES = 16
# Stands between texts; no token equals it.
BOUNDARY = -1

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class DraftRing(NamedTuple):
    """C slots, a power of two."""

    tokens: Array  # int32[C]
    namespaces: Array  # int32[C]
    previous: Array  # int64[C], place of the run before with the same hash; -1 for none
    latest: Array  # int64[C], by hash: place of the latest run's last token; -1 for none
    num_written: Array  # int64[1]


def new_ring(num_tokens: int) -> DraftRing:
    """A ring of at least `num_tokens` slots; 24 bytes each."""
    size = 1 << max(8, (num_tokens - 1).bit_length())
    return DraftRing(
        np.full(size, BOUNDARY, np.int32),
        np.zeros(size, np.int32),
        np.full(size, -1, np.int64),
        np.full(size, -1, np.int64),
        np.zeros(1, np.int64),
    )


@inner
def _bucket(ring: DraftRing, namespace: int, tokens: Array, end: int) -> np.int64:
    """Of the MIN_MATCH tokens before `end`."""
    mixed = np.uint64(namespace) * _MULTIPLIER
    for i in range(end - MIN_MATCH, end):
        mixed = (mixed ^ np.uint64(tokens[i])) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(ring.latest.size - 1))


@kernel
def remember(ring: DraftRing, namespace: int, tokens: Array) -> None:
    """Appends a text; of one longer than the ring only the end."""
    mask = ring.tokens.size - 1
    place = ring.num_written[0]
    begin = max(0, tokens.size - mask)
    for i in range(begin, tokens.size):
        slot = place & mask
        ring.tokens[slot] = tokens[i]
        ring.namespaces[slot] = namespace
        ring.previous[slot] = -1
        if i - begin + 1 >= MIN_MATCH:
            bucket = _bucket(ring, namespace, tokens, i + 1)
            ring.previous[slot] = ring.latest[bucket]
            ring.latest[bucket] = place
        place += 1
    ring.tokens[place & mask] = BOUNDARY
    ring.num_written[0] = place + 1


@inner
def _match_length(ring: DraftRing, namespace: int, suffix: Array, place: int) -> int:
    """How many tokens up to `place` equal the end of the suffix; 0 for another namespace's."""
    mask = ring.tokens.size - 1
    if ring.namespaces[place & mask] != namespace:
        return 0
    oldest = max(0, ring.num_written[0] - ring.tokens.size)
    limit = min(MAX_MATCH, min(suffix.size, place - oldest + 1))
    length = 0
    while length < limit and ring.tokens[(place - length) & mask] == suffix[suffix.size - 1 - length]:
        length += 1
    return length


@inner
def _find(ring: DraftRing, namespace: int, suffix: Array, places: Array) -> tuple[int, int]:
    """Fills `places` with the occurrences of the longest match, latest first: their number and its length."""
    count, best = 0, MIN_MATCH
    place = ring.latest[_bucket(ring, namespace, suffix, suffix.size)]
    oldest = max(0, ring.num_written[0] - ring.tokens.size)
    for _ in range(MAX_CANDIDATES):
        if place < oldest:
            break
        length = _match_length(ring, namespace, suffix, place)
        if length > best:
            count, best = 0, length
        if length == best:
            places[count] = place
            count += 1
        place = ring.previous[place & (ring.tokens.size - 1)]
    return count, best


@inner
def _vote(ring: DraftRing, places: Array, count: int) -> int:
    """The most frequent token that follows the places, of equals the latest; BOUNDARY when nothing does."""
    mask = ring.tokens.size - 1
    winner, most = BOUNDARY, 0
    for i in range(count):
        token = ring.tokens[(places[i] + 1) & mask]
        if token == BOUNDARY or places[i] + 1 >= ring.num_written[0]:
            continue
        votes = 0
        for j in range(count):
            votes += ring.tokens[(places[j] + 1) & mask] == token
        if votes > most:
            winner, most = token, votes
    return winner


@kernel
def propose(ring: DraftRing, namespace: int, suffix: Array, max_tokens: int, out: Array) -> int:
    """Writes a draft of at most `max_tokens` and of at most as many tokens as were matched; its length.

    suffix: the last tokens of a sequence, MAX_MATCH of them are looked at.
    """
    if suffix.size < MIN_MATCH:
        return 0
    mask = ring.tokens.size - 1
    places = np.empty(MAX_CANDIDATES, np.int64)
    count, matched = _find(ring, namespace, suffix, places)
    num_drafted = 0
    while num_drafted < min(max_tokens, matched):
        token = _vote(ring, places, count)
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
