"""What lower precision costs: perplexity, and agreement with float32 on the likeliest token.

Text: the documentation of some modules of the standard library, in pieces of `LENGTH` tokens. Products of few
rows may be computed in other ways than those of many, so both are measured.
"""

import argparse
import asyncio
import inspect
import json
import logging
import random
import subprocess
import typing
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.figures import figure
from engine import kv_pool
from engine.batch import ScheduledSequence, build_batch
from engine.kv_pool import BLOCK_SIZE
from engine.model.cpu_decoder import CpuDecoder
from engine.sequence import Request, SamplingParams, Sequence
from engine.weights.load import open_checkpoint
from services.frontend.text import gguf_tokenizer
from services.frontend.text.gguf_metadata import read_metadata

MODEL = "smollm2-135m-instruct"
LENGTH, NUM_PIECES = 256, 10
MODULES = (argparse, asyncio, inspect, json, logging, random, subprocess, typing)
KINDS = {
    "auto": (torch.bfloat16, "auto", LENGTH),
    "auto.few_rows": (torch.bfloat16, "auto", 4),
    "bfloat16": (torch.bfloat16, "dtype", LENGTH),
    "int8": (torch.bfloat16, "int8", LENGTH),
    "int8.few_rows": (torch.bfloat16, "int8", 4),
}


class Judged(NamedTuple):
    loss: float  # mean, in nats
    likeliest: torch.Tensor  # [tokens]


def _texts() -> list[list[int]]:
    """Token ids."""
    tokenizer = gguf_tokenizer.build(read_metadata(open_checkpoint(MODEL).path))
    documented = [(m, *(value for _, value in inspect.getmembers(m, inspect.isfunction))) for m in MODULES]
    text = "\n".join(inspect.getdoc(thing) or "" for things in documented for thing in things)
    ids = tokenizer.encode(text)
    pieces = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
    return pieces[:NUM_PIECES]


def _judge(dtype: torch.dtype, weights: str, rows: int, texts: list[list[int]]) -> Judged:
    """Runs the texts through the model, so many rows at a time."""
    model = CpuDecoder(open_checkpoint(MODEL), dtype, LENGTH, weights)
    c, num_blocks = model.config, -(-LENGTH // BLOCK_SIZE)
    kv = kv_pool.allocate(c.num_layers, num_blocks, c.num_kv_heads, c.head_dim, dtype)
    losses, likeliest = [], []
    for tokens in texts:
        sequence = Sequence(Request("", tokens, SamplingParams(num_prompt_logprobs=0)), 0, 0)
        sequence.block_table = list(range(num_blocks))
        for start in range(0, len(tokens) - 1, rows):
            count = min(rows, len(tokens) - 1 - start)
            logits = model.logits(build_batch((ScheduledSequence(sequence, start, count),)), kv)[:count]
            following = torch.tensor(tokens[start + 1 : start + 1 + count])
            losses.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
            likeliest.append(logits.argmax(-1))
            sequence.num_computed = start + count
    return Judged(float(torch.cat(losses).mean()), torch.cat(likeliest))


def measure() -> list[dict[str, Any]]:
    texts = _texts()
    exact = _judge(torch.float32, "dtype", LENGTH, texts)
    figures = [figure("quality.float32.perplexity", float(np.exp(exact.loss)), "", "lower")]
    for kind, (dtype, weights, rows) in KINDS.items():
        judged = _judge(dtype, weights, rows, texts)
        equal = float((judged.likeliest == exact.likeliest).float().mean())
        figures.append(figure(f"quality.{kind}.perplexity", float(np.exp(judged.loss)), "", "lower"))
        figures.append(figure(f"quality.{kind}.top1_equal", equal, "", "higher"))
    return figures
