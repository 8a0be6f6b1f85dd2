"""OpenVINO GenAI's continuous batching on a GGUF file, with prefix caching and split prompts."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai

from runner import Request, num_threads, parser, run


def main() -> None:
    flags = parser().parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 64, 512
    scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": num_threads()}
    pipeline = openvino_genai.ContinuousBatchingPipeline(flags.model, scheduler, "CPU", properties)

    def generate(name: str, requests: list[Request]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([request["ids"]], dtype=np.int64)) for request in requests]
        results = pipeline.generate(prompts, [config(request["n"]) for request in requests])
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    run(flags, generate)


def config(num_tokens: int) -> openvino_genai.GenerationConfig:
    result = openvino_genai.GenerationConfig()
    result.max_new_tokens = result.min_new_tokens = num_tokens
    result.ignore_eos, result.do_sample = True, False
    return result


if __name__ == "__main__":
    main()
