"""How an engine is to be built."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    served_name: str  # empty: the checkpoint's
    device: str  # "auto", "cpu" or "cuda"
    dtype: str  # "bfloat16", "float16" or "float32"
    weights: str  # "auto", "dtype", or "int8" on a CPU
    max_model_len: int  # 0: the model's context
    num_blocks: int  # 0: from the device's memory
    memory_fraction: float  # of free RAM, on a CPU
    gpu_memory_utilization: float  # of a GPU's whole memory, weights included
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    num_threads: int  # 0: one per core
    speculation: bool
    draft_branches: int = 1  # 1: chains
