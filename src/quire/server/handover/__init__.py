"""Two servers that share the work of a prompt (docs/handover.md).

``prompts``: what one asks the other for; ``prefill``, which computes prompts for others;
``decode``, which asks for them and goes on alone where that fails.
"""
