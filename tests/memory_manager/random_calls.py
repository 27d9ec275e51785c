"""Random calls: mostly right ones, some wrong ones, many that meet in the trie or run out of blocks."""

import random
from dataclasses import dataclass

from tests.memory_manager.model import Namespace, Sequence
from tests.memory_manager.model_updates import AcquireCall, Call
from tests.memory_manager.side_by_side import SideBySide, random_tokens


@dataclass(frozen=True)
class Mix:
    """How often what happens."""

    name: str
    max_prompt: int = 200
    admit: float = 0.5
    release: float = 0.15
    fork: float = 0.1
    truncate: float = 0.2
    room: float = 0.7
    wrong: float = 0.05
    clear: float = 0.02
    pin: float = 0.05
    pipelined: float = 0.5  # a step is still running
    crowd: float = 0.1  # several requests with the same prompt at once


MIXES = (
    Mix("plain"),
    Mix("short prompts", max_prompt=40, admit=0.9, release=0.4),
    Mix("long lives", admit=0.2, release=0.03),
    Mix("trees", fork=0.6, admit=0.2, release=0.3),
    Mix("idle", pipelined=0.0, truncate=0.5),
    Mix("wrong", wrong=0.5),
    Mix("pins and clearing", pin=0.5, clear=0.1),
    Mix("crowds", max_prompt=160, crowd=0.7, release=0.3, fork=0.0),
)


class RandomCalls:
    def __init__(self, both: SideBySide, seed: int, tenants: list[str], namespaces: list[Namespace]) -> None:
        self.both = both
        self.rng = random.Random(seed)
        self.tenants = tenants
        self.namespaces = namespaces
        self.last_id = 0
        self.waiting: list[AcquireCall] = []
        self.woken: list[int] = []
        self.pins: list[int] = []

    def run(self, mix: Mix, num_operations: int) -> int:
        """Makes calls with at least so many operations; answers how many they had."""
        done = 0
        while done < num_operations:
            call = self.next_call(mix)
            answer = self.both.update(call)
            done += call.num_operations
            if answer is not None:
                self.follow_up(call, answer.acquires, answer.wake)
            done += self.sometimes(mix)
        return done

    def follow_up(self, call: Call, results: list[tuple[object, ...]], wake: list[int]) -> None:
        for acquire, result in zip(call.acquires, results, strict=True):
            self.waiting = [w for w in self.waiting if w.sequence_id != acquire.sequence_id]
            if result == ("WAIT",):
                self.waiting.append(acquire)
        self.waiting = [w for w in self.waiting if w.sequence_id not in call.releases]
        assert all(any(w.sequence_id == sequence_id for w in self.waiting) for sequence_id in wake)
        self.woken += wake

    def sometimes(self, mix: Mix) -> int:
        rng = self.rng
        if rng.random() < mix.clear:
            self.both.clear(rng.choice([None, *(salt for salt, _ in self.namespaces)]))
        if rng.random() < mix.pin:
            tokens = random_tokens(rng, rng.randint(0, 100))
            pin = self.both.pin(rng.choice(self.tenants), rng.choice(self.namespaces), tokens, 1000)
            self.pins += [pin] if pin is not None else []
        if self.pins and rng.random() < mix.pin:
            self.both.unpin(self.pins.pop(rng.randrange(len(self.pins))))
        return 1

    def next_call(self, mix: Mix) -> Call:
        rng, model = self.rng, self.both.model
        launched = model.launched + rng.randint(0, 1)
        pipelined = rng.random() < mix.pipelined
        completed = rng.randint(model.completed, launched) if pipelined else launched
        call = Call(launched, completed)
        alive = [s for s in model.sequences.values() if rng.random() < 0.8]
        call.advances = [self.advance(sequence) for sequence in alive]
        lengths = {sequence_id: len(tokens) for sequence_id, tokens, _ in call.advances}
        for sequence in alive:
            if rng.random() < mix.truncate:
                length = len(sequence.tokens) + lengths[sequence.sequence_id]
                least = -(-length // 16)
                call.truncates.append((sequence.sequence_id, rng.randint(least, len(sequence.table))))
        call.releases = [s.sequence_id for s in model.sequences.values() if rng.random() < mix.release]
        staying = [s for s in model.sequences.values() if s.sequence_id not in call.releases]
        call.forks = [(s.sequence_id, self.new_id()) for s in staying if rng.random() < mix.fork][:3]
        roomy = [s.sequence_id for s in staying] + [child for _, child in call.forks]
        call.rooms = [(i, rng.choice((1, 2, 8, 40))) for i in roomy if rng.random() < mix.room]
        call.acquires = self.acquires(mix)
        if self.waiting and rng.random() < 0.1:
            call.releases.append(rng.choice(self.waiting).sequence_id)
            call.acquires = [a for a in call.acquires if a.sequence_id not in call.releases]
        if rng.random() < mix.wrong:
            self.spoil(call)
        if rng.random() < 0.7:
            call.num_drafts = [rng.choice((0, 1, 5, 64)) for _ in call.advances]
        return call

    def new_id(self) -> int:
        self.last_id += self.rng.randint(1, 3)
        return self.last_id

    def advance(self, sequence: Sequence) -> tuple[int, list[int], int]:
        """Usually a token or a few, and all but the last written; sometimes the writes lag."""
        rng = self.rng
        space = len(sequence.table) * 16 - len(sequence.tokens)
        num_tokens = min(space, rng.choice((0, 1, 1, 1, 5, 17)))
        length = len(sequence.tokens)
        tokens = [1 + (length + i) // 16 * 7 % 3 for i in range(num_tokens)]
        if tokens and rng.random() < 0.1:  # mostly blocks that meet in the trie, sometimes new ones
            tokens[rng.randrange(num_tokens)] = rng.randint(1, 9)
        if rng.random() < 0.7:
            num_written = max(sequence.num_written, length + num_tokens - 1)
        else:
            num_written = rng.randint(sequence.num_written, length + num_tokens)
        return sequence.sequence_id, tokens, num_written

    def acquires(self, mix: Mix) -> list[AcquireCall]:
        rng = self.rng
        acquires = [w for w in self.waiting if w.sequence_id in self.woken or rng.random() < 0.1]
        self.woken = []
        while rng.random() < mix.admit and len(acquires) < 6:
            num_tokens = rng.randint(1, mix.max_prompt) if rng.random() < 0.95 else rng.randint(200, 1200)
            tokens = random_tokens(rng, num_tokens)
            namespace = rng.choice(self.namespaces)
            for _ in range(rng.randint(2, 4) if rng.random() < mix.crowd else 1):
                tail = random_tokens(rng, rng.randint(0, 20))
                tenant = rng.choice(self.tenants)
                asks = rng.random() < 0.9
                acquires.append(AcquireCall(self.new_id(), tokens + tail, tenant, namespace, asks))
        return acquires

    def spoil(self, call: Call) -> None:
        """One thing wrong."""
        rng = self.rng
        known = list(self.both.model.sequences) or [1]
        some = rng.choice(known)
        acquire = AcquireCall(some, [1, 2, 3], "a", ("", ""), True)
        spoilers = [
            lambda: call.advances.append((10**12, [], 0)),
            lambda: call.advances.append((some, [1] * 2000, 0)),
            lambda: call.advances.append((some, [], 10**6)),
            lambda: call.truncates.append((some, 0)),
            lambda: call.truncates.append((some, -1)),
            lambda: call.truncates.append((some, 10**4)),
            lambda: call.forks.append((10**12, self.new_id())),
            lambda: call.forks.append((some, some)),
            lambda: call.rooms.append((some, -1)),
            lambda: call.rooms.append((10**12, 1)),
            lambda: call.acquires.append(acquire),
            lambda: call.acquires.append(AcquireCall(0, [1], "a", ("", ""), True)),
            lambda: call.acquires.extend([acquire, acquire]),
            lambda: setattr(call, "completed", call.launched + 1),
        ]
        rng.choice(spoilers)()
