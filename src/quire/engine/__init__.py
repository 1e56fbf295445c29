"""The engine: requests in, tokens out, one step at a time.

``engine`` over ``steps``: the loop. ``scheduler`` over ``request_queues``: what runs next.
``sampling_step``: tokens out of logits. ``drafts``, ``exact``: tokens that a step
verifies. ``session_requests``, ``pins``, ``checkpoints``: what is kept. ``blending``,
``prompt_blend``: prompts of segments. ``beam``: beam search.
"""
