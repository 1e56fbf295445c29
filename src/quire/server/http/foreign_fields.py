"""Fields of llama.cpp, LM Studio, ollama, vLLM, SGLang and text-generation-webui.

What means the same here is taken under its own name (``RENAMED``). Of the others that would change
a text, the values that ask for nothing pass, since clients send defaults; any other is refused by
name (``UNSUPPORTED``, ``OTHER_SAMPLERS``). Fields that only tune what is refused, such as
``mirostat_tau``, and those without effect on a text, such as ``cache_prompt``, are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from quire.server.http.errors import bad_field

Table: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields: values without effect, and advice for others. Null has no effect."""

RENAMED: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Parameters by the names that other servers have for them."""
UNLIMITED = (-1, -2)
"""What ``n_predict`` and ``num_predict`` are without a limit."""

ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The order of operations here."""

_NOT_HERE = "this server does not support it"
_ADAPTER = "load an adapter, and give its name as model"
_TRUNCATION = "use top_p, top_k or min_p"
_AGAINST = "use repetition_penalty, frequency_penalty or presence_penalty"
_TEMPERATURE = "temperature does not change within a text"
_ORDER = f"the order of operations is {', '.join(ORDER)}"
_INFILL = "POST /infill fills in text before a suffix"
_ITS_TEMPLATE = "only the model's own template is used"
_ALL_TOKENS = "penalties count all tokens of prompt and text; send -1, or leave it out"

OTHER_SAMPLERS: Table = {
    "mirostat": ((0,), _TRUNCATION),
    "mirostat_mode": ((0,), _TRUNCATION),
    "typical_p": ((1,), _TRUNCATION),
    "typ_p": ((1,), _TRUNCATION),
    "tfs": ((1,), _TRUNCATION),
    "tfs_z": ((1,), _TRUNCATION),
    "top_a": ((0,), _TRUNCATION),
    "top_n_sigma": ((-1, 0), _TRUNCATION),
    "epsilon_cutoff": ((0,), _TRUNCATION),
    "eta_cutoff": ((0,), _TRUNCATION),
    "min_keep": ((0, 1), "filters keep one token at least"),
    "xtc_probability": ((0,), _TRUNCATION),
    "adaptive_target": ((-1,), _TRUNCATION),
    "dry_multiplier": ((0,), _AGAINST),
    "no_repeat_ngram_size": ((0,), _AGAINST),
    "encoder_repetition_penalty": ((1,), _AGAINST),
    "penalty_alpha": ((0,), _AGAINST),
    "penalize_nl": ((False,), _AGAINST),
    "penalize_newline": ((False,), _AGAINST),
    "dynatemp_range": ((0,), _TEMPERATURE),
    "dynamic_temperature": ((False,), _TEMPERATURE),
    "smoothing_factor": ((0,), _TEMPERATURE),
    "do_sample": ((True,), "temperature 0 takes the most likely token"),
    "temperature_last": ((False,), _ORDER),
    "samplers": (([], list(ORDER)), _ORDER),
    "sampler_priority": (([], list(ORDER)), _ORDER),
    "sampler_order": (([],), _ORDER),
    "guidance_scale": ((1,), _NOT_HERE),
    "cfg_scale": ((1,), _NOT_HERE),
    "num_beams": ((1,), "beam search is there in Python only: LLM.beam_search"),
    "custom_params": (({},), _NOT_HERE),
    "custom_logit_processor": (("",), "code is not taken over HTTP"),
    "custom_token_bans": (("",), "use logit_bias or bad_words"),
    "vllm_xargs": (({},), _NOT_HERE),
    "repetition_detection": ((), _AGAINST),
    "ban_eos_token": ((False,), "use ignore_eos"),
    "stop_regex": (("", []), "use stop"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "thinking_token_budget": ((-1,), "use reasoning_effort or enable_thinking"),
    "reasoning_budget": ((-1,), "use reasoning_effort or enable_thinking"),
    "thinking_budget_tokens": ((-1,), "use reasoning_effort or enable_thinking"),
    "preset": (("",), "give its parameters"),
    "n_indent": ((0,), _NOT_HERE),
    "t_max_predict_ms": ((-1, 0), "use max_tokens"),
}
"""Operations on logits that are not here, and ends of a text."""

UNSUPPORTED: Table = {
    **OTHER_SAMPLERS,
    "input_prefix": (("",), _INFILL),
    "input_suffix": (("",), _INFILL),
    "best_of": ((), "ask for n samples with their logprobs, and choose"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "prediction": ((), _NOT_HERE),
    "web_search_options": ((), "the server does not search"),
    "moderation": ((), "texts are not moderated"),
    "prompt_cache_options": ((), "prompts are cached anyway; cache_salt keeps them apart"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "use_beam_search": ((False,), "beam search is there in Python only: LLM.beam_search"),
    "length_penalty": ((1,), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "guided_decoding_backend": ((), _NOT_HERE),
    "truncate_prompt_tokens": ((), "prompts are never cut; send fewer tokens"),
    "logits_processors": (([],), "code is not taken over HTTP"),
    "spaces_between_special_tokens": ((True,), _NOT_HERE),
    "chat_template": ((), _ITS_TEMPLATE),
    "chat_template_str": (("",), _ITS_TEMPLATE),
    "instruction_template": (("",), _ITS_TEMPLATE),
    "instruction_template_str": (("",), _ITS_TEMPLATE),
    "character": (("",), "send a message of the system"),
    "continue_": ((False,), "use continue_final_message"),
    "add_special_tokens": ((), "the model's tokenizer and template decide"),
    "add_bos_token": ((True,), "the model's tokenizer and template decide"),
    "mm_processor_kwargs": ((), "only text is taken"),
    "media_io_kwargs": ((), "only text is taken"),
    "prompt_embeds": ((), "only text and token ids are taken"),
    "logprob_token_ids": (([],), "use logprobs"),
    "return_tokens": ((False,), "use return_token_ids"),
    "return_token_offsets": ((False,), _NOT_HERE),
    "return_prompt_text": ((False,), _NOT_HERE),
    "return_hidden_states": ((False,), _NOT_HERE),
    "kv_transfer_params": ((), _NOT_HERE),
    "include_reasoning": ((True,), "the reasoning is in reasoning_content; leave it out there"),
    "separate_reasoning": ((True,), "the reasoning is in reasoning_content"),
    "reasoning_format": (("auto", "deepseek"), "the reasoning is in reasoning_content"),
    "think": ((), "use enable_thinking or reasoning_effort"),
    "n_probs": ((0,), "use logprobs"),
    "post_sampling_probs": ((False,), "use logprobs"),
    "lora": (([],), _ADAPTER),
    "lora_path": ((), _ADAPTER),
    "options": (({},), "give its fields in the body itself, and num_predict, repeat_penalty and the like too"),
    "format": (("",), "use response_format"),
    "repeat_last_n": ((-1,), _ALL_TOKENS),
    "penalty_last_n": ((-1,), _ALL_TOKENS),
    "repetition_penalty_range": ((-1, 0), _ALL_TOKENS),
}
"""Fields that completions and chats refuse."""

_RANGES = ("repeat_last_n", "penalty_last_n", "repetition_penalty_range")


def rename(extra: Mapping[str, Any], given: dict[str, Any], names: dict[str, str]) -> None:
    """Add the parameters that ``extra`` gives by other names to those ``given``. Raise ``ApiError``
    400 for one that is also given by its own name, and otherwise."""
    for other, name in RENAMED.items():
        value = extra.get(other)
        if value is None:
            continue
        if name == "max_tokens" and type(value) is int and value in UNLIMITED and other != "max_new_tokens":
            value = None
        if name in given and given[name] != value:
            raise bad_field(other, f"{other} and {names[name]} differ; give one of them")
        given[name], names[name] = value, other


def refused_in(given: Mapping[str, Any]) -> Table:
    """Return ``UNSUPPORTED`` for a request with some parameters: the range of penalties has no
    effect without penalties."""
    neutral = (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))
    if any(given.get(name, value) != value for name, value in neutral):
        return UNSUPPORTED
    return {name: entry for name, entry in UNSUPPORTED.items() if name not in _RANGES}


def asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether a field's value is null or one of those ``harmless``. 1 is 1.0, and not
    true."""

    def kind(one: Any) -> type[Any]:
        return float if type(one) is int else type(one)

    return value is None or any(kind(value) is kind(other) and value == other for other in harmless)
