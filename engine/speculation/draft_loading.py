"""Loads the model that drafts."""

import hashlib
from dataclasses import dataclass, replace

import torch

from engine import kv_pool
from engine.backends import Backend
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.runner import Model
from engine.scheduler import SchedulerLimits
from engine.speculation.draft_model import DraftModel
from engine.warm_up import warm_up
from engine.weights.checkpoint import Checkpoint, ModelFile


def check_vocabulary(draft: ModelFile, target: ModelFile) -> None:
    """Raises ModelError unless both models spell every token the same way."""
    if _hash(draft) != _hash(target):
        raise ModelError(
            f"draft model {draft.config.name} has another vocabulary than {target.config.name}: "
            "their tokenizers must be the same"
        )


def _hash(model: ModelFile) -> str:
    return hashlib.sha256("\0".join(model.vocabulary()).encode()).hexdigest()


@dataclass(frozen=True)
class DraftWeights:
    """A loaded model that has no pages yet."""

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    max_position: int

    def start(self, backend: Backend, limits: SchedulerLimits, vocab_size: int) -> DraftModel:
        """Allocates as many blocks as the served model has, whose vocabulary's size is given; warms up."""
        c = self.config
        kv = kv_pool.allocate(
            c.num_layers, limits.num_blocks, c.num_kv_heads, c.head_dim, self.dtype, backend.device
        )
        # It drafts for one sequence at a time.
        limits = replace(limits, max_num_seqs=1, max_model_len=min(limits.max_model_len, self.max_position))
        runner = backend.runner(self.model, kv, limits)
        costs = warm_up(runner, limits, c.vocab_size, backend.records_decodes)
        vocab_size = min(vocab_size, c.vocab_size)
        return DraftModel(self.model, kv, vocab_size, limits.max_model_len, costs.plain.seconds(1))


def load_draft_weights(
    draft: Checkpoint, backend: Backend, dtype: torch.dtype, max_model_len: int
) -> DraftWeights:
    """Raises ModelError in one sentence when it cannot."""
    max_position = min(max_model_len, draft.config.max_position)
    return DraftWeights(backend.load(draft, dtype, max_position), draft.config, dtype, max_position)
