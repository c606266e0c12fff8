"""Starting processes: ``zf.launch`` from a notebook or a script, ``zero-fn run`` from a shell.

``starting`` starts one process for each rank and watches over them, ``rank`` is what such a process
runs, ``scripts`` is the shell over torchrun, ``script`` what it runs in place of a script.
"""

from .starting import RankError, launch

__all__ = ["RankError", "launch"]
