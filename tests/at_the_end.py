"""What a test opens it need not close: that is done when its body has ended, before its fixtures are.

`conftest.py` calls `end_all`; what a child process opens nobody ends.
"""

from __future__ import annotations

from contextlib import ExitStack

_ENDS = ExitStack()

at_the_end = _ENDS.callback
"""Have this called when the test has ended, whether it passed or failed; what came last is ended first."""

end_all = _ENDS.close
"""Call what `at_the_end` was told, each once, also after one that failed."""
