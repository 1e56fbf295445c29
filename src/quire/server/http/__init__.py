"""The application: what every request passes.

``app``, ``serving``: the application and its process. ``gate`` over ``sites``, ``bodies``: who may
ask for how much. ``errors``, ``events``, ``status``, ``logs``, ``spans``: what is answered and
written down.
"""
