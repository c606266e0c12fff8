"""Costs of whole set-ups: a model by name, on a mesh, on some hardware.

``zero_fn.plan`` reads one traced step; this room makes the steps. ``presets.py`` has the models,
``setups.py`` says what is run and plans it, ``extrapolation.py`` makes plans of large models from
traces of small ones, ``formulas.py`` says what a set-up needs at least, ``search.py`` looks for
what fits and is fastest, ``claims.py`` holds published claims against plans, ``commands.py`` is
``zero-fn plan``.
"""
