"""The published contracts, as Protocols. Read these first.

``layers`` and ``model`` say what a model declares. ``kv_state``, ``kv_cache`` and ``executor`` give
each verb's meaning, shapes, units, errors and cost. Each begins with the letters of its shapes and
the rules for all its verbs. ``attention_state``, ``recurrent_state`` and ``pool_verbs`` are parts
of ``kv_state``; ``executor_inputs``, ``executor_calls`` and ``executor_reports`` hold the values of
``executor``. Import from these three.
"""
