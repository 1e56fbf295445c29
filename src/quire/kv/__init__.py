"""The KV state: sequences, the parts that keep their layers' rows, and files of it.

In the order of reading: ``state`` (the verbs; ``contract`` is its face for callers outside),
``part`` and the three parts ``paged``, ``encoders``, ``recurrent`` (together ``parts``);
bookkeeping without torch: ``sequences``, ``sequence_table``, ``pages``, ``windows``, ``trees``,
``recurrent_table``; an open forward: ``state_pass``, ``plans``; bytes: ``exchange``,
``import_verbs``, ``sequencefile``; how rows lie: ``formats``; a layer as named tensors:
``layer_memory``.
"""
