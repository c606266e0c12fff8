"""DeepSpeed's JSON configurations, read into steps of this library.

``config.py`` is the function, ``keys.py`` keeps account of every key, ``optimizing.py`` and
``sections.py`` read what has a counterpart, ``reasons.py`` says why the rest has none.
"""
