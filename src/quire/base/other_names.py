"""Options, commands and paths of llama.cpp, Ollama and vLLM, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping

_LENGTH = "--max-model-len gives the length of the context"
_GPU = "--device cuda puts the whole model on a GPU; layers are not divided"
_TOKENS = "--max-tokens gives the number of tokens to generate"
_BATCH = "--max-num-batched-tokens gives the tokens of a step"
_ROWS = "--max-num-seqs gives the number of sequences that run at a time"
_KV = "--kv-dtype gives the type of K and V"
_THREADS = "the environment variable OMP_NUM_THREADS gives the number of threads"
_ATTENTION = "--attention-backend chooses the kernels; auto takes the fastest"
_HUB = "the model is an argument: a directory or a Hugging Face id, as in quire serve MODEL"
_ADAPTERS = "--adapters NAME=PATH loads adapters"

OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--max-seq-len"), _LENGTH),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _GPU),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), _TOKENS),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _BATCH),
    **dict.fromkeys(("-np", "--parallel"), _ROWS),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"), _KV),
    **dict.fromkeys(("-t", "--threads"), _THREADS),
    **dict.fromkeys(("-fa", "--flash-attn"), _ATTENTION),
    **dict.fromkeys(("-hf", "--hf-repo"), _HUB),
    **dict.fromkeys(("--lora", "--lora-modules", "--enable-lora"), _ADAPTERS),
    **dict.fromkeys(("-p", "--prompt"), "the prompt is an argument, as in quire generate MODEL PROMPT"),
    "--temp": "--temperature gives the temperature",
    "--repeat-penalty": "--repetition-penalty gives the penalty",
    "--alias": "--served-model-name gives the model's name",
    "--allowed-origins": "--allowed-origin takes one origin, and may be repeated",
    "--block-size": "--page-size gives the tokens of a page",
    "--enable-auto-tool-choice": "tool calls are always read; --tool-call-parser names the format if the template does not show it",
    "--jinja": "the model's chat template is always used; --chat-template gives another one",
}

ALIASES: Mapping[str, str] = {"run": "chat"}
"""Commands of other programs that mean the same here."""

COMMANDS: Mapping[str, str] = {
    "pull": "quire serve MODEL and quire chat MODEL fetch a Hugging Face id when they first load it",
    "list": "quire models lists the bundled models and what runs",
    "ps": "quire top shows a running server",
    "show": "quire capabilities --model MODEL describes a model",
    "stop": "Ctrl-C, or the signal SIGTERM, stops a server",
    "complete": "quire generate MODEL PROMPT continues a text",
}

_TEXT = "POST /v1/completions continues a text, POST /completion in llama.cpp's form"
_NO_VECTORS = "no model that runs here has embeddings"

PATHS: Mapping[str, str] = {
    **dict.fromkeys(("/generate", "/generate_stream"), _TEXT),
    **dict.fromkeys(("/embedding", "/embeddings"), _NO_VECTORS),
    **dict.fromkeys(
        ("/api/pull", "/api/create"), "the server has the model that it was started with (quire serve MODEL)"
    ),
    "/lora-adapters": "POST /v1/load_lora_adapter loads an adapter",
    "/responses": "POST /v1/responses answers items",
    "/messages": "POST /v1/messages answers blocks",
    "/ping": "GET /health tells whether the server runs",
}
