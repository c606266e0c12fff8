"""The shapes of GPT-2's parameters: the leaf lists that optimizers are measured on."""


def gpt2_shapes(name: str) -> list[tuple[int, ...]]:
    """``small`` has 124 M parameters, ``xl`` 1.5 B, ``tiny`` 2,664. Matrices are 2-dim."""
    layers, width, vocabulary, length = {
        "tiny": (2, 8, 97, 16),
        "small": (12, 768, 50257, 1024),
        "xl": (48, 1600, 50257, 1024),
    }[name]
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block = [
        *norm,
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],
        *norm,
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],
    ]
    return [(vocabulary, width), (length, width), *block * layers, *norm]
