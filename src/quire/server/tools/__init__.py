"""Tool calls, reasoning and answers in a model's text.

``formats`` over ``reader`` and ``literals``: how families write calls. ``call_grammars``,
``choice``: calls that are forced. ``messages``: a text as reasoning, content, calls.
"""
