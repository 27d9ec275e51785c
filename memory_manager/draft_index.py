"""The draft index: past texts of every namespace, of all engines that serve the same model."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memory_manager.columns import INT32, INT64, Int32s, Int64s
from memory_manager.core import texts
from memory_manager.core.drafts import MAX_MATCH, MIN_SIZE, DraftRing, new_ring, remember, texts_of
from memory_manager.tables import Tables


class TextNamespace(NamedTuple):
    model_fingerprint: str
    salt: str
    adapter: str


class DraftIndex:
    """A ring of tokens per namespace, which grows with use to half of all tokens that may be kept.

    When the rings exceed these together, the namespaces go whose last text is the oldest.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: bound of all rings together; 0 remembers nothing."""
        self.max_tokens = max_tokens
        self.rings: dict[TextNamespace, DraftRing] = {}  # by the age of the last text, oldest first
        self._num_slots = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for ring in self.rings.values() for array in ring)

    def remember(self, namespace: TextNamespace, ended: Int32s) -> None:
        """Adds texts, each with a BOUNDARY behind it."""
        ring = self._take(namespace) or new_ring(MIN_SIZE)
        size = ring.tokens.size
        while int(ring.num_written[0]) + ended.size > size and 4 * size <= self.max_tokens:
            size *= 2
        if size > ring.tokens.size:
            ring = _filled(size, texts_of(ring))
        remember(ring, ended)
        self._put(namespace, ring)
        self._drop_surplus()

    def restore(self, namespace: TextNamespace, size: int, ended: Int32s) -> None:
        """A ring of `size` with what another one like it held."""
        self._put(namespace, _filled(size, ended))

    def forget(self, condition: Callable[[TextNamespace], bool]) -> None:
        for namespace in list(filter(condition, self.rings)):
            self._take(namespace)

    def configure(self, max_tokens: int) -> None:
        """From now on, this is the bound."""
        self.max_tokens = max_tokens
        for namespace, ring in list(self.rings.items()):
            if MIN_SIZE < ring.tokens.size and 2 * ring.tokens.size > max_tokens:
                size = max(MIN_SIZE, 1 << max(0, (max_tokens // 2).bit_length() - 1))
                self.rings[namespace] = _filled(size, texts_of(ring)[-size:])
                self._num_slots += size - ring.tokens.size
        self._drop_surplus()

    def _put(self, namespace: TextNamespace, ring: DraftRing) -> None:
        self.rings[namespace] = ring
        self._num_slots += ring.tokens.size

    def _take(self, namespace: TextNamespace) -> DraftRing | None:
        ring = self.rings.pop(namespace, None)
        if ring is not None:
            self._num_slots -= ring.tokens.size
        return ring

    def _drop_surplus(self) -> None:
        while self._num_slots > self.max_tokens and len(self.rings) > (self.max_tokens > 0):
            self._take(next(iter(self.rings)))


def _filled(size: int, ended: Int32s) -> DraftRing:
    ring = new_ring(size)
    remember(ring, ended)
    return ring


class Drafts(NamedTuple):
    """d drafts; each continues the first `base_lengths` tokens of its sequence."""

    sequence_ids: Int64s  # [d]
    base_lengths: Int32s  # [d]
    num_tokens: Int32s  # [d]
    tokens: Int32s  # [sum(num_tokens)]


class PoolTexts:
    """The texts of one engine's sequences, on their way to and from the draft index."""

    def __init__(self, model_fingerprint: str, tables: Tables, index: DraftIndex) -> None:
        self._model_fingerprint = model_fingerprint
        self._tables = tables
        self._index = index

    def remember(self, roots: Int32s, sizes: Int32s, ended: Int32s) -> None:
        """Texts of sequences below these roots, of these sizes, one after the other."""
        start = 0
        for root, size in zip(roots.tolist(), sizes.tolist(), strict=True):
            if size:
                self._index.remember(self._namespace(root), ended[start : start + size])
                start += size

    def propose(self, sequence_ids: Int64s, num_wanted: Int32s) -> Drafts | None:
        """Drafts for the sequences that want them and still run, by namespace, then as they were named."""
        if not self._index.rings:
            return None
        roots = np.empty(sequence_ids.size, INT32)
        num_roots = texts.roots_that_ask(self._tables.arrays, sequence_ids, num_wanted, roots)
        ids, lengths = np.empty(sequence_ids.size, INT64), np.empty((2, sequence_ids.size), INT32)
        tokens = np.empty(MAX_MATCH * sequence_ids.size, INT32)
        num_drafts = num_tokens = 0
        for root in roots[:num_roots].tolist():
            ring = self._index.rings.get(self._namespace(root))
            if ring is not None:
                num_drafts, num_tokens = texts.propose(
                    self._tables.arrays, ring, root, sequence_ids, num_wanted,
                    ids, lengths, tokens, num_drafts, num_tokens,
                )  # fmt: skip
        if num_drafts == 0:
            return None
        base_lengths, sizes = lengths[:, :num_drafts].copy()
        return Drafts(ids[:num_drafts], base_lengths, sizes, tokens[:num_tokens].copy())

    def _namespace(self, root: int) -> TextNamespace:
        return TextNamespace(self._model_fingerprint, *self._tables.namespaces.names[root])
