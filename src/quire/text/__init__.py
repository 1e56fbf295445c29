"""Text to token ids and back.

``tokenizer`` over ``inner_text`` and ``token_bytes``: encoding at a text's beginning and in its
middle. ``detokenizer`` over ``decoder_stream``: text as tokens come.
``chat_rendering`` over ``chat_calls`` and ``template_programs``: messages through a model's
template; ``spelled_tokens``: special tokens that a text only spells. ``limited_process``:
strangers' templates and tokenizers in a child process.
"""
