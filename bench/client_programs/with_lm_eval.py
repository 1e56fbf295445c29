"""The class behind ``lm_eval --model local-completions``, by tokens and by text, one request at a
time and four."""

from __future__ import annotations

from typing import Any

from abilities import Abilities, Task, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def evaluation(task: Task) -> Abilities:
    def details(url: str) -> Any:
        found: dict[str, Any] = {}
        pairs = [tuple(pair) for pair in task.extra["continuations"]]
        for name, options in (
            ("tokens", {"tokenized_requests": True, "batch_size": 1}),
            ("tokens, 4 in a body", {"tokenized_requests": True, "batch_size": 4}),
            ("text, 4 at a time", {"tokenized_requests": False, "batch_size": 1, "num_concurrent": 4}),
        ):
            lm = LocalCompletionsAPI(
                base_url=f"{url}/v1/completions",
                model=task.model,
                tokenizer=task.extra["folder"],
                tokenizer_backend="huggingface",
                max_length=512,
                max_retries=1,
                **options,
            )
            asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
            scores = lm.loglikelihood(asked, disable_tqdm=True)
            found[f"loglikelihood, {name}"] = [score for score, _ in scores]
            found[f"loglikelihood, {name}, greedy"] = [own for _, own in scores]
            until = Instance("generate_until", {}, (task.prompt, {"until": ["\n\n"], "max_gen_toks": 16}), 0)
            (found[f"generate_until, {name}"],) = lm.generate_until([until], disable_tqdm=True)
        return found

    return {"details": details}


if __name__ == "__main__":
    run("lm-eval", {"lm-eval": evaluation})
