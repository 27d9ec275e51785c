"""The memory manager as a plain Python program: slow, without arrays, meant to be obviously right.

One engine's pool. A cached block is a Node in a dictionary keyed by everything that makes it what it is:
namespace and all tokens from the first on. Nothing is counted incrementally; everything is looked up.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.memory_manager.model_texts import Texts

BLOCK = 16

Namespace = tuple[str, str]
Key = tuple[Namespace, tuple[int, ...]]


class Rejected(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Limits:
    quota: int
    floor: int
    pin_cap: int


@dataclass(eq=False)
class Node:
    block: int
    key: Key
    parent: "Node | None"
    owner: str
    last_used: int = 0
    fence_step: int = 0
    num_holds: int = 0
    is_attached: bool = True
    children: "list[Node]" = field(default_factory=list)

    @property
    def is_used(self) -> bool:
        return self.num_holds > 0 or any(child.is_used for child in self.children)

    @property
    def depth(self) -> int:
        return 1 if self.parent is None else self.parent.depth + 1


@dataclass(eq=False)
class Sequence:
    sequence_id: int
    tenant: str
    namespace: Namespace
    tokens: list[int]
    num_written: int
    path: list[Node]  # shared blocks
    private: list[int]  # the blocks after them
    seals: bool = True
    num_inherited: int = 0  # tokens that stand in another sequence's text

    @property
    def table(self) -> list[int]:
        return [node.block for node in self.path] + self.private

    def key(self, num_blocks: int) -> Key:
        return self.namespace, tuple(self.tokens[: num_blocks * BLOCK])


@dataclass
class Waiter:
    sequence_id: int
    key: Key
    num_blocks: int
    is_woken: bool = False


@dataclass
class Pinned:
    tenant: str
    node: Node


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


class Model:
    def __init__(
        self,
        num_blocks: int,
        min_wait_blocks: int,
        limits: Callable[[str], Limits],
        texts: Texts,
        *,
        fifo: bool = False,
    ) -> None:
        self.texts = texts
        self.fifo = fifo
        self.num_blocks = num_blocks
        self.min_wait_blocks = min_wait_blocks
        self.limits = limits
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack
        self.fence: list[tuple[int, int | None]] = []  # (block, step; None: the next call's launched_step)
        self.sequences: dict[int, Sequence] = {}
        self.ready: dict[Key, Node] = {}
        self.pending: dict[Key, Sequence] = {}
        self.waiters: list[Waiter] = []
        self.pins: dict[int, Pinned] = {}
        self.launched = self.completed = self.tick = 0
        self.counts: Counter[str] = Counter()
        self.tenant_evictions: Counter[str] = Counter()

    # ---- blocks

    def put_back(self, block: int, step: int) -> None:
        if step <= self.completed:
            self.free.append(block)
        else:
            self.fence.append((block, step))

    def begin(self, launched: int, completed: int) -> None:
        self.launched, self.completed = launched, completed
        fence, self.fence = self.fence, []
        for block, step in fence:
            self.put_back(block, launched if step is None else step)

    def take(self, sequence: Sequence, num_blocks: int) -> list[int]:
        taken = [self.free.pop() for _ in range(num_blocks)]
        sequence.private += taken
        return taken

    def drop_private(self, sequence: Sequence, num_kept: int) -> None:
        while len(sequence.private) > num_kept:
            self.put_back(sequence.private.pop(), self.launched)

    # ---- holds

    def nodes(self) -> list[Node]:
        """Every shared block, detached ones too."""
        found = dict.fromkeys(self.ready.values())
        for sequence in self.sequences.values():
            found.update(dict.fromkeys(sequence.path))
        return list(found)

    def drop_hold(self, node: Node) -> None:
        if not (self.fifo and node.last_used):
            self.tick += 1
            node.last_used = self.tick
        node.fence_step = self.launched
        node.num_holds -= 1
        self.free_detached(node)

    def free_detached(self, node: Node | None) -> None:
        while node is not None and not node.is_attached and not node.is_used:
            self.put_back(node.block, node.fence_step)
            if node.parent is not None:
                node.parent.children.remove(node)
                node.parent.fence_step = max(node.parent.fence_step, node.fence_step)
            node = node.parent

    # ---- accounts

    def charged(self, tenant: str) -> int:
        private = sum(len(s.private) for s in self.sequences.values() if s.tenant == tenant)
        return private + sum(node.owner == tenant for node in self.nodes())

    def evictable(self) -> list[Node]:
        return [node for node in self.ready.values() if not node.is_used]

    def reserve(self, tenant: str, wanted: int, *, partial: bool) -> int:
        """Makes room; answers how many blocks can be taken: all or, unless partial, 0 and nothing is done."""
        plan = Plan(self)
        allowed = self.limits(tenant).quota - self.charged(tenant)
        while allowed < wanted and (leaf := plan.oldest_leaf(tenant)) is not None:
            plan.add(leaf)
            allowed += 1
        allowed = min(allowed, wanted)
        while len(self.free) + len(plan.victims) < allowed:
            victim = plan.next_victim(tenant)
            if victim is None:
                break
            plan.add(victim)
        granted = max(0, min(allowed, len(self.free) + len(plan.victims)))
        if granted < wanted and not partial:
            return 0
        for node in plan.victims:
            self.evict(node)
        return granted

    def evict(self, node: Node) -> None:
        del self.ready[node.key]
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.last_used = max(node.parent.last_used, node.last_used)
            node.parent.fence_step = max(node.parent.fence_step, node.fence_step)
        self.put_back(node.block, node.fence_step)
        self.counts["num_evictions"] += 1
        self.tenant_evictions[node.owner] += 1

    # ---- the trie

    def match(self, namespace: Namespace, tokens: list[int], limit: int) -> tuple[list[Node], int]:
        """The cached path, and how many blocks after it are being computed."""
        path: list[Node] = []
        num_pending = 0
        for i in range(1, limit + 1):
            key = (namespace, tuple(tokens[: i * BLOCK]))
            if key in self.ready:
                path.append(self.ready[key])
            elif key in self.pending:
                num_pending += 1
            else:
                break
        return path, num_pending

    def seal(self, sequence: Sequence) -> Node | None:
        """Seals the first private block; answers the node that replaced it, if one did."""
        key = sequence.key(len(sequence.path) + 1)
        parent = sequence.path[-1] if sequence.path else None
        winner = self.ready.get(key)
        block = sequence.private.pop(0)
        if winner is None:
            computing = self.pending.get(key)
            if computing is sequence:
                del self.pending[key]
                self.wake(key, was_sealed=True)
            elif computing is not None:
                self.retract(computing, len(sequence.path) + 1)
            node = Node(block, key, parent, sequence.tenant)
            self.ready[key] = node
            if parent is not None:
                parent.children.append(node)
        else:
            node = winner
            self.fence.append((block, None))
            self.counts["num_replaced_blocks"] += 1
        node.num_holds += 1
        if parent is not None:
            parent.num_holds -= 1
        sequence.path.append(node)
        return winner

    def retract(self, sequence: Sequence, first: int) -> None:
        for num_blocks in range(first, len(sequence.tokens) // BLOCK + 1):
            key = sequence.key(num_blocks)
            if self.pending.get(key) is not sequence:
                break
            del self.pending[key]
            self.wake(key, was_sealed=False)

    def wake(self, key: Key, *, was_sealed: bool) -> None:
        for waiter in self.waiters:
            if waiter.key == key and not waiter.is_woken:
                waiter.is_woken = True
                self.counts["num_coalesced_tokens"] += waiter.num_blocks * BLOCK * was_sealed

    def take_woken(self) -> list[int]:
        woken = [waiter.sequence_id for waiter in self.waiters if waiter.is_woken]
        self.waiters = [waiter for waiter in self.waiters if not waiter.is_woken]
        return woken


class Plan:
    """Victims, leaf first, before anything is done to them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.victims: list[Node] = []
        active = {tenant for tenant in self.owners() if model.charged(tenant) > 0}
        self.share = model.num_blocks // max(1, len(active))

    def owners(self) -> set[str]:
        return {n.owner for n in self.model.nodes()} | {s.tenant for s in self.model.sequences.values()}

    def add(self, node: Node) -> None:
        self.victims.append(node)

    def last_used(self, node: Node) -> int:
        return max([node.last_used] + [self.last_used(c) for c in node.children if c in self.victims])

    def fence_step(self, node: Node) -> int:
        return max([node.fence_step] + [self.fence_step(c) for c in node.children if c in self.victims])

    def oldest_leaf(self, tenant: str) -> Node | None:
        """The least recently used leaf, unless a launched step may still read it."""
        leaves = [
            node
            for node in self.model.evictable()
            if node.owner == tenant
            and node not in self.victims
            and all(child in self.victims for child in node.children)
        ]
        oldest = min(leaves, key=self.last_used, default=None)
        return oldest if oldest and self.fence_step(oldest) <= self.model.completed else None

    def next_victim(self, requester: str) -> Node | None:
        candidates: list[tuple[bool, int, Node]] = []
        for tenant in self.owners():
            charged = self.model.charged(tenant) - sum(node.owner == tenant for node in self.victims)
            floor = self.model.limits(tenant).floor
            leaf = self.oldest_leaf(tenant)
            if leaf is not None and (charged > floor or tenant == requester):
                candidates.append((charged <= max(self.share, floor), self.last_used(leaf), leaf))
        return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None
