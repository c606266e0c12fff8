"""Names that nobody knows: what to say about them."""

import difflib
from collections.abc import Iterable


def suggestion(name: object, known: Iterable[str]) -> str:
    """The nearest known name as a question, then all of them.

    >>> suggestion("1bits", ["1bit", "bf16"])
    "did you mean '1bit'? There are '1bit', 'bf16'"
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return (f"did you mean {near[0]!r}? T" if near else "t") + (
        f"here are {', '.join(map(repr, known))}"
    )
