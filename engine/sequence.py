"""Requests and their sequences: what the engine knows about a stream of tokens."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.grammar import Grammar
from engine.kv_pool import BLOCK_SIZE
from engine.logprobs import Logprobs


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never contains
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)  # generated before, on an engine that was lost
    num_choices: int = 1
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    arrival: float = 0.0  # seconds since the epoch
    report_blocks: bool = False
    disable_speculation: bool = False
    grammar: Grammar | None = None  # that every choice's output obeys


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


class OfferedDraft(NamedTuple):
    """Guessed to follow the first `base_length` tokens of a sequence."""

    base_length: int
    tokens: list[int]


# A new sequence's drafts are expected to be good; it soon learns.
PRIOR_ACCEPTANCE = 0.7


class Sequence:
    """One choice of a request.

    The first `num_computed` of its tokens have their K/V in the pool. A running sequence whose
    `num_computed` is all but the last token decodes; before that it prefills.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        order: int,
        siblings: tuple["Sequence", ...] = (),
        max_model_len: int | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.order = order  # of arrival
        self.tokens = [*request.prompt, *request.output]
        self.num_prompt = len(request.prompt)
        self.matcher = None if request.grammar is None else request.grammar.start()
        self._follow(request.output)
        self.max_tokens = self.num_prompt + request.sampling.max_tokens  # prompt and output at most
        if max_model_len is not None:
            self.max_tokens = min(self.max_tokens, max_model_len)
        self.status = Status.WAITING
        self.sequence_id = 0  # in the memory manager, new at every admission
        self.block_table: list[int] = []
        self.num_computed = 0
        self.num_reported = 0  # final tokens the memory manager knows
        self.num_written_reported = 0
        self.num_cached: int | None = None  # prompt tokens found in the cache at first admission
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.siblings = siblings  # choices to be forked when the prompt is computed
        self.prompt_logprobs: list[Logprobs] = []  # one per prefill chunk
        self.started = False  # an output has been sent
        self.offered_draft: OfferedDraft | None = None  # by the memory manager
        self.acceptance = PRIOR_ACCEPTANCE  # of drafted tokens, an exponential average
        self.num_judged = 0  # drafted tokens in it
        self.shadow: Sequence | None = None  # the same tokens in a draft model's pages
        self.draft_room = 0  # slots wanted for drafts beyond the next token

    def append(self, token: int) -> None:
        """A final token of the output."""
        self.tokens.append(token)
        self._follow([token])

    def _follow(self, tokens: list[int]) -> None:
        if self.matcher is not None:
            for token in tokens:
                self.matcher.accept(token)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def capacity(self) -> int:
        """Token slots granted."""
        return len(self.block_table) * BLOCK_SIZE

    def slot(self, position: int) -> int:
        """Where in the pool a token's K/V lies."""
        return self.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @property
    def draft_depth(self) -> int:
        """Tokens that may be drafted one behind the other: the target's own behind them must fit too."""
        if self.siblings or self.wants_prompt_logprobs or self.request.disable_speculation:
            return 0
        return self.max_tokens - self.num_tokens - 1

    @property
    def wants_drafts(self) -> bool:
        return self.num_uncomputed == 1 and not self.request.disable_speculation

    @property
    def wants_prompt_logprobs(self) -> bool:
        """While the prompt of the first choice is computed for the first time."""
        asked = self.request.sampling.num_prompt_logprobs is not None
        return asked and self.index == 0 and not self.started

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts the most urgent first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.order)

    def drop_blocks(self) -> None:
        """Forgets everything in the pool: the sequence was preempted or has ended."""
        self.block_table = []
        self.num_computed = self.num_reported = self.num_written_reported = 0
        self.prompt_logprobs.clear()
        self.offered_draft = None
        self.draft_room = 0
        if self.shadow is not None:
            self.shadow.drop_blocks()
            self.shadow = None

    def take_blocks_of(self, other: "Sequence") -> None:
        """Continues where another sequence with the same prompt stands."""
        self.sequence_id, self.block_table = other.sequence_id, other.block_table
        self.num_computed, self.num_reported = other.num_computed, other.num_reported
        self.num_written_reported = other.num_written_reported
        other.sequence_id = 0
        other.drop_blocks()
