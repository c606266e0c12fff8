"""The notebooks: one question each. ``build.py`` executes them."""
