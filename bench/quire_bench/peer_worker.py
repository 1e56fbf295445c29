"""One runtime in a process of its own, which ``peer_table`` controls by lines of JSON.

``PYTHON peer_worker.py NAME``, where ``PYTHON`` is the interpreter that has the runtime: only
the standard library is imported before a model is loaded. A request is ``{"verb": NAME, ...}`` with
the verb's arguments, the reply ``{"reply": ...}`` or ``{"error": TEXT}``. The verbs are the methods
of :class:`Peer`, and ``quit``. All tokens are ids, all texts greedy.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

UBATCH = 512
"""Tokens of a piece of a prompt in llama.cpp; its own default."""

GGUF_KINDS = {"bfloat16": "BF16", "float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}

Placed = list[list[int]]
"""New tokens of each sequence."""


class Peer(Protocol):
    """A loaded model, for one measurement at a time."""

    def load(
        self,
        model: str,
        *,
        dtype: str,
        quantization: str | None,
        threads: int,
        length: int,
        batch: int,
        kv_bytes: int,
    ) -> dict[str, Any]:
        """Load ``model`` for sequences of at most ``length`` tokens, ``batch`` at a time; return
        the version and the settings.
        """
        ...

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Return the ``seconds`` to the first token, and ``tokens``; nothing is kept."""
        ...

    def place(self, prompts: list[list[int]], room: int) -> Placed:
        """Keep these contexts, with room for ``room`` more tokens each; return the tokens made so
        far."""
        ...

    def decode(self, steps: int) -> dict[str, Any]:
        """Run steps over all placed contexts; return ``seconds`` of each, and the new
        ``tokens``."""
        ...

    def release(self) -> None:
        """Release the placed contexts."""
        ...


class QuirePeer:
    """The engine of an ``LLM``, without its prefix cache."""

    def load(
        self,
        model: str,
        *,
        dtype: str,
        quantization: str | None,
        threads: int,
        length: int,
        batch: int,
        kv_bytes: int,
    ) -> dict[str, Any]:
        import numpy
        import torch

        from quire import LLM, SamplingParams, __version__
        from quire.kernels.linear.packed_memory import COLLAPSING

        torch.set_num_threads(threads)
        self.array = numpy.array
        settings = {"max_num_batched_tokens": max(2048, batch), "max_num_seqs": batch, "enable_prefix_caching": False}
        self.llm = LLM(
            model,
            device="cpu",
            dtype=dtype,
            quantization=quantization,
            max_model_len=length,
            kv_cache_memory=kv_bytes,
            **settings,
        )
        for thread in threading.enumerate():
            if thread.name == COLLAPSING:  # weights move into huge pages in the first seconds
                thread.join()
        self.params = SamplingParams
        self.placed: list[Any] = []
        return {"version": __version__, **settings}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = self.place([prompt], 1)[0]
        seconds = time.perf_counter() - started
        self.release()
        return {"seconds": seconds, "tokens": tokens}

    def place(self, prompts: list[list[int]], room: int) -> Placed:
        params = self.params(temperature=0, max_tokens=room, ignore_eos=True)
        self.placed = [self.llm.engine.submit(self.array(prompt), params)[0] for prompt in prompts]
        while not all(request.output.token_ids or request.finished for request in self.placed):
            self.llm.engine.step()
        return self._new([0] * len(prompts))

    def decode(self, steps: int) -> dict[str, Any]:
        before = [len(request.output.token_ids) for request in self.placed]
        seconds = timed(self.llm.engine.step, steps)
        return {"seconds": seconds, "tokens": self._new(before)}

    def _new(self, before: list[int]) -> Placed:
        for request in self.placed:
            if request.output.error is not None:
                raise request.output.error
        return [list(request.output.token_ids[start:]) for request, start in zip(self.placed, before, strict=True)]

    def release(self) -> None:
        self.llm.engine.end(self.placed)
        self.placed = []


class ExpandingPeer(QuirePeer):
    """Quire with the blocks of GGUF files expanded when they are loaded."""

    def load(self, model: str, **given: Any) -> dict[str, Any]:
        from quire.weights.lazy_parameters import LazyParameters

        LazyParameters.stored = lambda self, weight: []  # type: ignore[method-assign]
        return super().load(model, **given)


class TransformersWorker:
    """``transformers``, whose model is called directly, which costs less than its ``generate``."""

    PIECE = 8192
    """Tokens of a forward when contexts are placed."""

    def load(
        self,
        model: str,
        *,
        dtype: str,
        quantization: str | None,
        threads: int,
        length: int,
        batch: int,
        kv_bytes: int,
    ) -> dict[str, Any]:
        refuse(quantization)
        import torch
        import transformers

        from quire_bench.peers import TransformersPeer

        torch.set_num_threads(threads)
        self.torch = torch
        self.peer = TransformersPeer(model, getattr(torch, dtype))
        self.cache: Any = None
        self.last: Any = None
        return {"version": transformers.__version__, "attn_implementation": "sdpa", "cache": "DynamicCache"}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        done = self.peer.prefill(self.torch.tensor([prompt]))
        return {"seconds": done.seconds, "tokens": done.logits.argmax(-1).tolist()}

    def place(self, prompts: list[list[int]], room: int) -> Placed:
        for piece in self.torch.tensor(prompts).split(max(1, self.PIECE // len(prompts)), dim=1):
            self._forward(piece)
        return self.last.tolist()

    def decode(self, steps: int) -> dict[str, Any]:
        texts: Placed = [[] for _ in self.last]

        def step() -> None:
            self._forward(self.last)
            for text, token in zip(texts, self.last[:, 0].tolist(), strict=True):
                text.append(token)

        return {"seconds": timed(step, steps), "tokens": texts}

    def _forward(self, ids: Any) -> None:
        with self.torch.inference_mode():
            out = self.peer.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.cache, self.last = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def release(self) -> None:
        self.cache = self.last = None


class VllmPeer:
    """vLLM's engine in this process, so that each of its steps can be timed."""

    settings: ClassVar[dict[str, Any]] = {
        "max_num_batched_tokens": 4096,
        "block_size": 128,
        "enable_prefix_caching": False,
    }

    def load(
        self,
        model: str,
        *,
        dtype: str,
        quantization: str | None,
        threads: int,
        length: int,
        batch: int,
        kv_bytes: int,
    ) -> dict[str, Any]:
        refuse(quantization)
        import vllm  # in its own environment only
        from vllm.sampling_params import RequestOutputKind

        self.llm = vllm.LLM(
            model,
            dtype=dtype,
            max_model_len=length,
            max_num_seqs=batch,
            kv_cache_memory_bytes=kv_bytes,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **self.settings,
        )
        self.engine = self.llm.llm_engine
        self.greedy = lambda room: vllm.SamplingParams(
            temperature=0, max_tokens=room, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self.placed: list[str] = []
        self.made = 0
        return {"version": vllm.__version__, **self.settings, "OpenMP": Path(os.environ.get("LD_PRELOAD", "")).name}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        tokens = self.place([prompt], 1)[0]
        seconds = time.perf_counter() - started
        self.release()
        return {"seconds": seconds, "tokens": tokens}

    def place(self, prompts: list[list[int]], room: int) -> Placed:
        params = self.greedy(room)
        for prompt in prompts:
            self.made += 1
            self.placed.append(str(self.made))
            self.engine.add_request(self.placed[-1], {"prompt_token_ids": prompt}, params)
        texts: Placed = [[] for _ in prompts]
        while not all(texts):
            self._step(texts)
        return texts

    def decode(self, steps: int) -> dict[str, Any]:
        texts: Placed = [[] for _ in self.placed]
        return {"seconds": timed(lambda: self._step(texts), steps), "tokens": texts}

    def _step(self, texts: Placed) -> None:
        for output in self.engine.step():
            texts[self.placed.index(output.request_id)].extend(output.outputs[0].token_ids)

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """Answer all prompts at once; return the ``seconds`` to the last of ``lengths`` new tokens
        each, the seconds to the ``first`` token, and the ``tokens``.
        """
        texts: dict[str, list[int]] = {str(self.made + 1 + index): [] for index in range(len(prompts))}
        self.made += len(prompts)
        first, started = 0.0, time.perf_counter()
        for name, prompt, length in zip(texts, prompts, lengths, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, self.greedy(length))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                first = first or time.perf_counter() - started
                texts[output.request_id].extend(output.outputs[0].token_ids)
        return {"seconds": time.perf_counter() - started, "first": first, "tokens": list(texts.values())}

    def release(self) -> None:
        self.engine.abort_request(self.placed)
        self.placed = []
        while self.engine.has_unfinished_requests():
            self.engine.step()


class NgramPeer(VllmPeer):
    """vLLM with drafts out of the prompt and the answer; prompts are in its prefix cache."""

    settings: ClassVar[dict[str, Any]] = {
        **VllmPeer.settings,
        "enable_prefix_caching": True,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    }


class LlamaPeer:
    """llama.cpp by the C interface in ``llama-cpp-python``."""

    def load(
        self,
        model: str,
        *,
        dtype: str,
        quantization: str | None,
        threads: int,
        length: int,
        batch: int,
        kv_bytes: int,
    ) -> dict[str, Any]:
        import llama_cpp
        import numpy
        from gguf_files import gguf_file

        self.c, self.numpy = llama_cpp, numpy
        given = Path(model)
        kind = "as it is" if given.suffix == ".gguf" else GGUF_KINDS[quantization or dtype]
        file = given if given.suffix == ".gguf" else gguf_file(given, kind)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp does not read the file")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        exact = dtype == "float32"
        self.kv = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        # Its flash attention rounds K and V to half precision, whatever their dtype.
        self.flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if exact else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.threads, self.length = threads, length
        self.context: Any = None
        self.batch: Any = None
        self.last: list[int] = []
        self.position = 0
        return {
            "version": llama_cpp.__version__,
            "file": kind,
            "kv": "F32" if exact else "F16",
            "n_batch": 2048,
            "n_ubatch": UBATCH,
            "flash_attn": not exact,
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        self._make_context(1, len(prompt) + 1)
        started = time.perf_counter()
        tokens = [self._take_in(0, prompt)]
        seconds = time.perf_counter() - started
        self.release()
        return {"seconds": seconds, "tokens": tokens}

    def place(self, prompts: list[list[int]], room: int) -> Placed:
        self._make_context(len(prompts), len(prompts[0]) + room)
        self.last = [self._take_in(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        self.position = len(prompts[0])
        return [[token] for token in self.last]

    def decode(self, steps: int) -> dict[str, Any]:
        texts: Placed = [[] for _ in self.last]

        def step() -> None:
            self._run([(token, self.position, sequence, True) for sequence, token in enumerate(self.last)])
            self.last = [self._best(row) for row in range(len(self.last))]
            self.position += 1
            for text, token in zip(texts, self.last, strict=True):
                text.append(token)

        return {"seconds": timed(step, steps), "tokens": texts}

    def tokenize(self, texts: list[str]) -> Placed:
        """Return the ids of each text, with the tokens that its vocabulary adds, control tokens
        read.
        """
        vocab, found = self.c.llama_model_get_vocab(self.model), []
        for text in texts:
            data = text.encode()
            room = (self.c.llama_token * (len(data) + 8))()
            count = self.c.llama_tokenize(vocab, data, len(data), room, len(room), True, True)
            if count < 0:
                raise RuntimeError(f"llama_tokenize returned {count}")
            found.append(list(room[:count]))
        return found

    def logits(self, prompt: list[int], path: str) -> None:
        """Write float32 ``[T, V]``, the logits after each token, as a NumPy file."""
        self._make_context(1, len(prompt))
        self._run([(token, position, 0, True) for position, token in enumerate(prompt)])
        rows = self.c.llama_get_logits(self.context)
        self.numpy.save(path, self.numpy.ctypeslib.as_array(rows, shape=(len(prompt), self.vocab)))
        self.release()

    def _make_context(self, sequences: int, length: int) -> None:
        """Make a context with a separate stream for each sequence, so that attention reads no
        others."""
        self.release()
        options = self.c.llama_context_default_params()
        # Each sequence gets an equal part, which must be a multiple of 256.
        options.n_ctx = sequences * (-(-length // 256) * 256)
        options.n_batch, options.n_ubatch, options.n_seq_max = 2048, UBATCH, sequences
        options.n_threads = options.n_threads_batch = self.threads
        options.flash_attn_type = self.flash
        options.type_k = options.type_v = self.kv
        options.kv_unified = False
        self.context = self.c.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {options.n_ctx} tokens")
        self.batch = self.c.llama_batch_init(2048, 0, 1)

    def _take_in(self, sequence: int, prompt: list[int]) -> int:
        """Run a prompt; return the first new token."""
        rows = [(token, position, sequence, position == len(prompt) - 1) for position, token in enumerate(prompt)]
        for start in range(0, len(rows), 2048):
            self._run(rows[start : start + 2048])
        return self._best(-1)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if failed := self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {failed}")

    def _best(self, row: int) -> int:
        logits = self.c.llama_get_logits_ith(self.context, row)
        return int(self.numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def release(self) -> None:
        if self.context:
            self.c.llama_batch_free(self.batch)
            self.c.llama_free(self.context)
        self.context = None


PEERS: dict[str, Callable[[], Peer]] = {
    "quire": QuirePeer,
    "quire-expanded": ExpandingPeer,
    "transformers": TransformersWorker,
    "llama.cpp": LlamaPeer,
    "vllm": VllmPeer,
    "vllm-ngram": NgramPeer,
}


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each of ``steps`` calls."""
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds


def refuse(quantization: str | None) -> None:
    """Raise for a runtime that is not measured with quantised weights."""
    if quantization is not None:
        raise ValueError(f"{quantization}: only Quire and llama.cpp are measured with it")


def serve(peer: Peer, requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until ``quit`` or the end of the input."""
    for line in requests:
        given = json.loads(line)
        verb = given.pop("verb")
        if verb == "quit":
            return
        try:
            # Collect garbage of the previous verb outside of the next verb's measured time.
            gc.collect()
            answer = {"reply": getattr(peer, verb)(**given)}
        except Exception as error:  # any exception: the parent reports it and continues without this peer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies, flush=True)


def main() -> None:
    """Serve the peer named on the command line."""
    # Replies have a channel of their own: output of libraries goes to the error stream.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":
        # The parent stops idle peers (SIGSTOP); a stopped process would outlive a killed parent.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    serve(PEERS[sys.argv[1]](), sys.stdin, replies)


if __name__ == "__main__":
    main()
