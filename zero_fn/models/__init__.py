"""Worked examples: models as pure functions of a dict of tensors."""
