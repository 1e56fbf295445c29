"""Speculation: who proposes the next tokens of a request, and how many of them a step verifies.

A *proposer* drafts tokens (``proposer.Proposer``, one of ``proposers``). The *controller* weighs
what drafts are likely to save against what they cost, from measurements. Requests draw their tokens
as they always do, and a draft counts only where it is the token drawn, so neither can change a
text.

``engine.drafts`` asks the proposer for a step. ``engine.steps`` verifies the drafts when it reads
the step, and ``branches.owner`` takes the state of the rejected ones back.
"""
