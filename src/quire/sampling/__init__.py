"""From logits to tokens.

``filters``: temperature, top-k, top-p, min-p and the draw. ``logit_edits``, ``seen_tokens``,
``exclusions``: bias, penalties, and tokens that are not drawn. ``request_sampler``: one request's
parameters and random stream. ``sampler``: all requests of a step. ``draws``: tokens that stay on
the device. ``token_logprobs``: log-probabilities.
"""
