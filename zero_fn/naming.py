"""Names in messages: of dtypes, of sizes, and of what nobody knows."""

import difflib
from collections.abc import Iterable

import torch


def suggestion(name: object, known: Iterable[str]) -> str:
    """The nearest known name as a question, then all of them.

    >>> suggestion("1bits", ["1bit", "bf16"])
    "did you mean '1bit'? There are '1bit', 'bf16'"
    >>> suggestion("a100", ["h100", "a100-80gb"])  # the beginning of one
    "did you mean 'a100-80gb'? There are 'h100', 'a100-80gb'"
    """
    known = list(known)
    longer = [other for other in known if name and other.startswith(str(name))]
    near = longer or difflib.get_close_matches(str(name), known, 1)
    return (f"did you mean {near[0]!r}? T" if near else "t") + (
        f"here are {', '.join(map(repr, known))}"
    )


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def short_dtype(dtype: torch.dtype) -> str:
    """A dtype in a few letters.

    >>> short_dtype(torch.bfloat16)
    'bf16'
    """
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _SHORT.get(letters, letters) + name.removeprefix(letters)


def size_of(count: float) -> str:
    """A number of bytes with its unit.

    >>> size_of(3 << 19)
    '1.5 MiB'
    """
    size, unit = unit_of(count)
    return f"{count / size:.{int(size > 1)}f} {unit}"


def unit_of(count: float) -> tuple[int, str]:
    """The unit in which a number of bytes is told, in bytes, and its name.

    >>> unit_of(3 << 19)
    (1048576, 'MiB')
    """
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return next((unit for unit in units if count >= unit[0]), (1, "B"))
