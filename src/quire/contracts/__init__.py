"""The published contracts, as Protocols. Read these first.

``layers`` and ``model`` say what a model declares. ``kv_state``, ``kv_cache`` and ``executor`` say
what every verb does: meaning, shapes, units, errors, cost. Each begins with the letters that its shapes use and the rules that
hold for all its verbs. ``attention_state``, ``recurrent_state`` and ``pool_verbs`` are parts of ``kv_state``;
``executor_inputs``, ``executor_calls`` and ``executor_reports`` are the values of ``executor``. Import from the three.
"""
