"""The trace of agents' sessions on vLLM, in vLLM's own environment; started by ``bench/stores.py
--vllm PYTHON``.

``python bench/agent_trace_vllm.py MODEL SESSIONS VOCABULARY SHORTER POOL_TOKENS`` prints one JSON
line.
"""

from __future__ import annotations

import json
import os
import sys

from agent_trace import AT_ONCE, AgentTrace

BLOCK = 32
"""Tokens of a block of vLLM."""


def main() -> None:
    """Run the command line."""
    model, *numbers = sys.argv[1:]
    sessions, vocabulary, shorter, pool = map(int, numbers)
    agents = AgentTrace(sessions, vocabulary, shorter)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    # The default leaves one core to other work; a machine with two cores cannot spare it.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    from vllm import LLM, SamplingParams  # in its own environment only

    llm = LLM(
        model,
        enable_prefix_caching=True,
        block_size=BLOCK,
        num_gpu_blocks_override=pool // BLOCK,
        max_model_len=min(4096, pool // BLOCK * BLOCK),
        max_num_seqs=AT_ONCE,
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=agents.answer, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> list[tuple[list[int], float]]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [(list(one.outputs[0].token_ids), one.metrics.first_token_latency) for one in outputs]

    generate([[3 + index % 1000 for index in range(600)]])
    llm.reset_prefix_cache()
    played = agents.play(generate)
    print(json.dumps({"seconds": played.seconds, "first": played.first, "answers": played.answers}))


if __name__ == "__main__":
    main()
