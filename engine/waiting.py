"""Sequences that wait for blocks, and whose turn it is.

Higher priority first. Within a priority the tenant that was served the fewest tokens goes first (virtual
token counters: Sheng et al. 2024, "Fairness in Serving Large Language Models"), within a tenant the earlier
arrival. A sequence that was preempted comes back before those that never ran.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Sequence]] = {}
        self._parked: dict[int, Sequence] = {}
        self._served: defaultdict[str, float] = defaultdict(float)  # tokens, comparable between tenants
        self._last_served = 0.0  # of the tenant that was the last to wait no more

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values())) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._by_tenant.values():
            yield from queue
        yield from self._parked.values()

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._by_tenant:
            self._join(tenant)
        bisect.insort(self._by_tenant[tenant], sequence, key=_turn)

    def discard(self, sequence: Sequence) -> None:
        if self._parked.pop(sequence.sequence_id, None) is None:
            self._take(sequence)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Notes that tokens of a tenant were computed."""
        self._served[tenant] += num_tokens

    def first(self, count: int) -> list[Sequence]:
        """The next `count` in turn; a tenant's turn passes as if what is picked were served already."""
        picked: list[Sequence] = []
        heads = {tenant: iter(queue) for tenant, queue in self._by_tenant.items()}
        heads_now = {tenant: next(queue) for tenant, queue in heads.items()}
        served = {tenant: self._served[tenant] for tenant in heads}
        while heads_now and len(picked) < count:
            tenant = min(heads_now, key=lambda t: (*_turn(heads_now[t])[:2], served[t], heads_now[t].order))
            sequence = heads_now.pop(tenant)
            picked.append(sequence)
            served[tenant] += sequence.num_tokens
            following = next(heads[tenant], None)
            if following is not None:
                heads_now[tenant] = following
        return picked

    def park(self, sequence: Sequence) -> None:
        """Its prefix is being computed by another sequence; `wake` brings it back."""
        self._take(sequence)
        self._parked[sequence.sequence_id] = sequence

    def wake(self, sequence_ids: set[int]) -> None:
        for sequence_id in sequence_ids & self._parked.keys():
            self.add(self._parked.pop(sequence_id))

    def wake_all(self) -> None:
        self.wake(set(self._parked))

    def _take(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._by_tenant.get(tenant, [])
        if sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._by_tenant[tenant]
                self._last_served = self._served[tenant]

    def _join(self, tenant: str) -> None:
        """A tenant that was away gathers no credit: it starts level with the least served one that waits,
        or with the last one that did."""
        level = min((self._served[other] for other in self._by_tenant), default=self._last_served)
        self._served[tenant] = max(self._served[tenant], level)
        self._by_tenant[tenant] = []


def _turn(sequence: Sequence) -> tuple[int, bool, int]:
    """Priority, preempted before new, arrival."""
    return -sequence.request.priority, sequence.num_preemptions == 0, sequence.order
