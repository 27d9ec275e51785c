"""The same workloads on OpenVINO GenAI's continuous batching, in one process without a server.

pip install openvino-genai          (in an environment of its own)
python -m benchmarks.openvino_peer MODEL.gguf [--lookup] [--workloads single,conc16,…]
"""

import argparse
import json
import time
from typing import Any

from benchmarks.workloads import workload

WORKLOADS = ("single", "conc8", "conc16", "prefix16", "long", "repeat", "repeat8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lookup", action="store_true", help="prompt lookup decoding, 5 tokens")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 16
    properties = {"prompt_lookup": True} if arguments.lookup else {}
    pipeline = genai.ContinuousBatchingPipeline(
        arguments.model, scheduler, "CPU", properties, {"enable_save_ov_model": False}
    )

    def config(num_tokens: int) -> Any:
        generation = genai.GenerationConfig()
        generation.max_new_tokens = num_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        if arguments.lookup:
            generation.num_assistant_tokens = 5
            generation.max_ngram_size = 4
        return generation

    for name in arguments.workloads.split(","):
        concurrency, requests = workload(name)
        pipeline.generate(["Hello there"], [config(4)])
        started = time.perf_counter()
        if concurrency == 1:
            for prompt, num_tokens in requests:
                pipeline.generate([prompt], [config(num_tokens)])
        else:
            pipeline.generate([p for p, _ in requests], [config(n) for _, n in requests])
        wall_s = time.perf_counter() - started
        rate = sum(num_tokens for _, num_tokens in requests) / wall_s
        print(json.dumps({"workload": name, "tok_s": round(rate, 1), "wall_s": round(wall_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
