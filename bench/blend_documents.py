"""Accuracy of blended answers of a real model, compared with full prefills.

Five documents of 550 to 700 tokens in one prompt, 20 questions with known answers
(``blend_questions.json``). Each document is computed separately and kept, and each question is
asked after all five, by the chat template if the model has one. Compared are the distribution of
the first token (KL in nats from the full prefill's), the greedy texts, and whether they contain the
known answer. *anew* is the share of the documents that was computed anew, *seconds* the time to the
first token. *lead* is what a document is computed behind: the start of a sequence (start), that and
a text (text, the default), or the beginning of the prompts (prompt).

``python bench/blend_documents.py --model DIR [--ratios 0.15,0.3,0.5] [--select v,v_or_question]
[--lead text,start,prompt] [--questions 20] [--order 0,1,2,3,4] [--dtype float32] [--tokens 24]``
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams, Session
from quire.base.segments import BlendParams, Segment
from quire.blend.calibration import deviation
from quire_bench.reports import print_json, print_table

DATA = Path(__file__).with_name("blend_questions.json")


class Asker:
    """One model, its documents and its questions."""

    def __init__(self, llm: LLM, order: Sequence[int], count: int, tokens: int) -> None:
        data = json.loads(DATA.read_text(encoding="utf-8"))
        self.llm, self.tokens = llm, tokens
        self.system: str = data["system"]
        self.documents = [data["documents"][number] + "\n\n" for number in order]
        self._shared: Session | None = None
        # Every question follows all documents except the last few tokens of the last one.
        encode = llm.tokenizer.encode
        self._common = sum(len(encode(one, add_special_tokens=False)) for one in self.documents) - 16
        self.questions: list[tuple[str, str]] = data["questions"][:: max(1, len(data["questions"]) // count)][:count]

    @property
    def beginning(self) -> str | list[dict[str, str]]:
        """Return the common beginning of all prompts."""
        if not self.llm.tokenizer.chat_templates:
            return self.system + "\n\n"
        return [{"role": "system", "content": self.system}]

    def ask(self, question: str, blend: BlendParams) -> tuple[RequestOutput, Tensor]:
        """Return the answer to a blended prompt, and the logits of its first token."""
        first: list[Tensor] = []
        params = self._params(first)
        if not self.llm.tokenizer.chat_templates:
            parts = [self.system + "\n\n", *map(Segment, self.documents), f"Question: {question}\nAnswer:"]
            (output,) = self.llm.generate([parts], params, blend=blend, use_tqdm=False)
        else:
            content = [{"type": "text", "text": one, "segment": True} for one in self.documents]
            content.append({"type": "text", "text": f"Question: {question}"})
            messages = [{"role": "system", "content": self.system}, {"role": "user", "content": content}]
            (output,) = self.llm.chat(messages, params, blend=blend, use_tqdm=False)
        return output, first[0]

    def _params(self, first: list[Tensor]) -> SamplingParams:
        def note(generated: Sequence[int], logits: Tensor) -> Tensor:
            if not generated:
                first.append(logits.clone())
            return logits

        return SamplingParams(temperature=0, max_tokens=self.tokens, logits_processors=[note])

    def full(self, ids: Sequence[int], common: int) -> tuple[Tensor, list[int]]:
        """Return the logits of the first token and the greedy tokens of a full prefill. The first
        ``common`` tokens, common to all prompts, are computed once."""
        if self._shared is None:
            self._shared = self.llm.session(ids[:common])
        first: list[Tensor] = []
        with self._shared.fork() as session:
            session.append(ids[common:])
            (output,) = self.llm.generate([session], self._params(first), use_tqdm=False)
        return first[0], output.outputs[0].token_ids

    def row(self, truth: dict[str, tuple[Tensor, list[int]]], blend: BlendParams) -> dict[str, Any]:
        """Return one row of the table, and print each answer. ``truth`` is filled by the first
        call."""
        kls, equal, first, right, anew, seconds = [], 0, 0, 0, [], []
        for question, known in self.questions:
            output, logits = self.ask(question, blend)
            if question not in truth:
                # The tokens before the question are the same in all prompts.
                truth[question] = self.full(output.prompt_token_ids, self._common)
            true, ids = truth[question]
            kls.append(deviation(true[None], logits[None]).kl)
            equal += output.outputs[0].token_ids == ids
            first += int(true.argmax()) == int(logits.argmax())
            right += known.lower() in output.outputs[0].text.lower()
            print(f"{kls[-1]:.4f} {output.outputs[0].token_ids == ids} {output.outputs[0].text!r}", flush=True)
            blended = output.blend
            assert blended is not None
            if not blended.blended and blend.ratio != 1:
                print(f"{question} ran in full: {blended.reason}")
            total = blended.blended + blended.recomputed
            anew.append(blended.recomputed / total if total else 1.0)
            seconds.append(output.metrics.time_to_first_token)
        return {
            "kl": statistics.fmean(kls),
            "worst": max(kls),
            "texts": equal,
            "first": first,
            "right": right,
            "of": len(kls),
            "anew": statistics.fmean(anew),
            "seconds": statistics.median(seconds),
        }

    def right_in_full(self, truth: dict[str, tuple[Tensor, list[int]]]) -> int:
        """Return the number of full prefills whose answers contain the known one."""
        tokenizer = self.llm.tokenizer
        return sum(known.lower() in tokenizer.decode(truth[question][1]).lower() for question, known in self.questions)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ratios", default="0.15,0.3,0.5")
    parser.add_argument("--select", default="v,v_or_question")
    parser.add_argument("--lead", default="text", help="text, start, prompt: what chunks are computed behind")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--order", default="0,1,2,3,4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    llm = LLM(
        given.model,
        dtype=given.dtype,
        kv_cache_memory="2GiB",
        max_model_len=8192,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )
    with llm:
        asker = Asker(llm, [int(one) for one in given.order.split(",")], given.questions, given.tokens)
        truth: dict[str, tuple[Tensor, list[int]]] = {}
        blending, lead = llm.engine.blending, llm.engine.blending.lead
        for kind in given.lead.split(","):
            blending.lead = blending.start if kind == "start" else lead
            llm.warm([Segment(one) for one in asker.documents], behind=asker.beginning if kind == "prompt" else None)
            for select in given.select.split(","):
                for ratio in map(float, given.ratios.split(",")):
                    found = asker.row(truth, BlendParams(ratio=ratio, select=select, keep=False))
                    rows.append({"lead": kind, "select": select, "ratio": ratio, **found})
                    print_table(rows[-1:])
        print_table(rows)
        print_json({"bench": "blend_documents", "right_in_full": asker.right_in_full(truth), "rows": rows})


if __name__ == "__main__":
    main()
