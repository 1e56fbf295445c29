"""From logits to tokens.

``filters``: temperature, top-k, top-p, min-p and the draw. ``logit_edits``, ``seen_tokens``: bias
and penalties. ``request_sampler``: one request's parameters and random stream. ``sampler``: all
requests of a step. ``draws``: tokens that stay on the device. ``token_logprobs``:
log-probabilities.
"""
