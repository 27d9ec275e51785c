"""Trees of drafts: what is proposed, what of it is verified, and what is left behind in the pool."""

from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
import pytest
import torch

from engine.batch import Batch, ScheduledSequence, build_batch
from engine.kernels.sampling import sample_rows
from engine.kv_pool import KVPool
from engine.page_mover import Move
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import PRIOR_ACCEPTANCE, Sequence
from engine.speculation.acceptance import LEARNING_RATE, Acceptance
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.planner import MAX_DRAFT_TOKENS, SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.step_cost import StepCost
from engine.speculation.verification import accepted_paths
from engine.warm_up import warm_up
from tests.engine.harness import Harness, request
from tests.engine.hash_model import HashModel, small_pool

LOOKUP = DraftSource.PROMPT_LOOKUP
CHEAP_ROWS = StepCost([(1, 1.0), (1000, 1.001)])
#       0
#    1     4
#   2 3    5
FORK = DraftTree([10, 11, 12, 13, 14], [0, 1, 1, 0, 4], LOOKUP)


class Scripted:
    """Proposes one tree, once the sequence has an output."""

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        return self._tree if sequence.num_output == 1 else None


def decoding(tokens: list[int], num_blocks: int = 2, **sampling: object) -> Sequence:
    """A sequence all of whose tokens but the last are computed."""
    sequence = Sequence(request("r", tokens, **sampling), 0, 0)  # type: ignore[arg-type]
    sequence.block_table, sequence.num_computed = list(range(num_blocks)), len(tokens) - 1
    return sequence


def test_a_tree_knows_its_paths() -> None:
    assert FORK.paths == [[], [10], [10, 11], [10, 12], [13], [13, 14]]
    assert FORK.depths == [1, 2, 2, 1, 2]
    assert FORK.ancestors == [0b1, 0b11, 0b101, 0b1000, 0b11000]
    assert FORK.children(0) == [1, 4]
    assert not FORK.is_chain
    assert DraftTree.chain([5, 6, 7], LOOKUP).is_chain
    kept = FORK.restricted([1, 3, 4])
    assert (kept.tokens, kept.parents) == ([10, 12, 13], [0, 1, 0])


def test_branches_share_what_they_begin_with() -> None:
    tree = DraftTree.merged([[1, 2, 3], [1, 2, 4], [5], [1, 2]], LOOKUP)
    assert tree.paths == [[], [1], [1, 2], [1, 2, 3], [1, 2, 4], [5]]


def test_prompt_lookup_proposes_several_continuations() -> None:
    tokens = [1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 9, 1, 2, 3, 7, 5, 0, 1, 2, 3]
    one, three = PromptLookup(), PromptLookup(3)
    chain, tree = one.propose(decoding(tokens), 8), three.propose(decoding(tokens), 8)
    assert chain is not None
    assert tree is not None
    assert chain.paths[-1] == [7, 5, 0]
    # The latest of equal matches first; what two continuations begin with is one node.
    assert tree.paths == [[], [7], [7, 5], [7, 5, 0], [8], [8, 8], [8, 8, 9], [7, 7], [7, 7, 1]]


def test_the_likeliest_nodes_are_verified_and_parents_with_them() -> None:
    sequence = decoding([1, 2, 3])
    sequence.acceptance = 0.6
    # Probabilities .6, .36, .144, .24, .144: a second child catches 0.6 of the 0.4 that the first one misses.
    planner = SpeculationPlanner([Scripted(FORK)], CHEAP_ROWS)
    sequence.tokens.append(9)
    drafts = [planner.plan([sequence], 0, budget)[0].paths[1:] for budget in (1, 2, 3, 4, 5)]
    assert drafts == [
        [[10]],
        [[10], [10, 11]],
        [[10], [10, 11], [13]],
        [[10], [10, 11], [10, 12], [13]],
        FORK.paths[1:],
    ]


def test_a_tree_is_cut_to_its_blocks() -> None:
    sequence = decoding([1] * 29, num_blocks=2)
    sequence.tokens.append(9)  # 30 tokens, 32 slots
    draft = SpeculationPlanner([Scripted(FORK)], CHEAP_ROWS).plan([sequence], 0, 100)[0]
    assert draft.paths[1:] == [[10], [10, 11]]
    assert sequence.draft_room == 4 * len(FORK.tokens), "for two longer ones"


def test_no_tree_is_larger_than_a_draft_may_be() -> None:
    wide = DraftTree.merged([list(range(i, i + 8)) for i in range(0, 80, 8)], LOOKUP)
    sequence = decoding([1] * 9, num_blocks=5)
    sequence.tokens.append(9)
    draft = SpeculationPlanner([Scripted(wide)], CHEAP_ROWS).plan([sequence], 0, 100)[0]
    assert len(draft.tokens) == MAX_DRAFT_TOKENS


@pytest.mark.parametrize(
    ("tokens", "hits"),
    [([10, 12, 1], [1, 0, 1]), ([13, 14, 1], [0, 1, 1]), ([10, 9], [1, 0, 0]), ([8], [0, 0])],
)
def test_every_node_that_was_compared_is_learned_from(tokens: list[int], hits: list[int]) -> None:
    sequence, expected = decoding([1]), PRIOR_ACCEPTANCE
    Acceptance().learn(sequence, FORK, tokens)
    for hit in hits:
        expected += LEARNING_RATE * (hit - expected)
    assert sequence.acceptance == pytest.approx(expected)


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_whichever_branch_is_right_it_is_accepted_and_its_slots_moved(branch: int) -> None:
    """The model reads its prefix from the pool: tokens left in a wrong slot would change what follows."""
    free = Harness().run(request("r", [5, 6, 7], max_tokens=30))["r", 0].tokens
    wrong = [[31 - free[1], 3, 3], [(free[1] + 1) % 32]]
    branches = [*wrong[:branch], free[1:5], *wrong[branch:]]
    harness = Harness(drafters=[Scripted(DraftTree.merged(branches, LOOKUP))])
    assert harness.run(request("r", [5, 6, 7], max_tokens=30))["r", 0].tokens == free
    metrics = harness.engine.metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (8, 4)
    harness.assert_idle_and_clean()


class Noted:
    """A `PageMover` that moves nothing."""

    def __init__(self) -> None:
        self.compacted: list[list[list[Move]]] = []

    def copy_blocks(self, src: Rows[int], dst: Rows[int]) -> None:
        assert not src, "there is no fork"

    def compact(self, moves: Rows[Rows[Move]]) -> None:
        self.compacted.append([list(of_sequence) for of_sequence in moves])


def test_at_most_one_slot_is_moved_for_each_accepted_token() -> None:
    mover = Noted()
    sequence = decoding([1] * 15, temperature=0.0)
    sequence.block_table = [3, 1]
    model = FixedModel({1: 13, 13: 14, 14: 2})
    # Of the other one the first branch is right, whose nodes are where they belong.
    other, draft = decoding([1] * 15, temperature=0.0), DraftTree.merged([[13, 14], [10]], LOOKUP)
    other.block_table = [0, 2]
    batch = build_batch((ScheduledSequence(other, 14, 1, draft), ScheduledSequence(sequence, 14, 1, FORK)))
    sampled = ModelRunner(model, small_pool(4), mover=mover).run(batch).sampled
    assert [one.tokens for one in sampled[0] or []] == [[13, 14, 2]]
    assert [one.tokens for one in sampled[1] or []] == [[13, 14, 2]]
    # Nodes 4 and 5 of positions 14 + 4 and 14 + 5 go to positions 15 and 16, in another block.
    assert mover.compacted == [[[(16 + 2, 48 + 15), (16 + 3, 16 + 0)]]]


def test_a_branch_is_accepted_and_moved_before_any_request() -> None:
    mover = Noted()
    runner = ModelRunner(HashModel(), small_pool(4), mover=mover)
    warm_up(runner, SchedulerLimits(4, max_num_batched_tokens=4), vocab_size=32)
    assert mover.compacted == [[[(2, 1)]]]


class FixedModel:
    """The next token's distribution is a function of the last token."""

    def __init__(self, following: dict[int, int] | torch.Tensor) -> None:
        if isinstance(following, dict):
            table = torch.zeros(32, 32)
            for token, target in following.items():
                table[token, target] = 1.0
            following = table
        self._table = following

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        return self._table[torch.from_numpy(batch.token_ids[batch.logit_rows]).long()]


TINY = 4  # tokens of the vocabulary
CHAIN = DraftTree.chain([1, 1, 1, 1], LOOKUP)
BUSHY = DraftTree.merged([[1, 1, 1, 1], [0, 1, 0], [2, 1], [1, 0], [3], [1, 3]], LOOKUP)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("draft", [CHAIN, BUSHY], ids=["chain", "tree"])
def test_accepted_runs_follow_the_targets_distribution(draft: DraftTree, temperature: float) -> None:
    """What is drawn after each token, over 200,000 verified drafts."""
    table = np.random.default_rng(3).normal(0, 1, (TINY, TINY)).astype(np.float32)
    table[:, 1] += 1
    nodes = np.array([0, *draft.tokens])
    num_trees, num_rows = 200_000, len(nodes)

    def each(value: float, dtype: type) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(num_trees * num_rows, value, dtype)

    targets = np.empty(num_trees * num_rows, np.int32)
    sample_rows(
        np.tile(table[nodes], (num_trees, 1)), each(temperature, np.float32), each(0, np.int32),
        each(1, np.float32), each(0, np.float32), np.repeat(np.arange(num_trees, dtype=np.uint64), num_rows),
        each(0, np.int64), np.tile(np.array([0, *draft.depths]), num_trees), targets,
    )  # fmt: skip
    sampled = targets.reshape(num_trees, num_rows)
    paths = accepted_paths([draft] * num_trees, sampled.tolist())
    runs = Counter((0, *tree[[0, *path]].tolist()) for tree, path in zip(sampled, paths, strict=True))
    counts = np.zeros((TINY, TINY))
    for run, count in runs.items():
        np.add.at(counts, (run[:-1], run[1:]), count)
    assert max(map(len, runs)) == 1 + max(draft.depths) + 1, "whole branches were accepted"
    expected = torch.softmax(torch.from_numpy(table) / temperature, -1).numpy()
    differences = counts - counts.sum(1, keepdims=True) * expected
    assert np.abs(differences).sum() / 2 / counts.sum() < 0.003, "total variation"
