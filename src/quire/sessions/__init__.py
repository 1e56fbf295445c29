"""Sessions: live sequences that a user holds.

``session``: the table of contents. ``edits``, ``saving``, ``history``, ``commits``,
``state``: bodies of its verbs. ``chat_turns``: its messages. ``durable``: sessions that outlive the
process.
"""
