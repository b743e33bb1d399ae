"""One step at a time on one model, whichever thread asks.

A step puts its own tensors in the places of the parameters. Two that overlap would find, and leave behind, those of
each other. An ordinary forward of the user takes no turn, and must not run meanwhile.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

_making = threading.Lock()
_turns: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def turn(model: nn.Module) -> threading.RLock:
    """The lock of a model, entered for a step; the one of the Transformers model where that is inside another."""
    from opake.patching.target import locate

    with _making:
        return _turns.setdefault(locate(model).model, threading.RLock())
