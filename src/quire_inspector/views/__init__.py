"""Views of a running engine. They change nothing.

``state_reading``: a copy of who holds which pages, made between two steps. ``state_views``: the
documents of one reading for all viewers, over ``branch_list``, ``history_tree``, ``pool_maps``,
``commit_list``, ``token_texts``. ``viewer``: what an API key may see. ``timeline_reader``,
``trace_events``: steps and requests in time.
"""
