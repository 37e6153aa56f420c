"""Every exception that FineMoE raises on purpose.

FineMoEError
├── InputError            bad input from outside; exit code 2
│   ├── TraceError        a request or routing trace: names file, row, column, value, remedy
│   ├── SettingError      an option, setting, profile or model description
│   └── PolicyError       a user's policy raised or answered what means nothing; with the user's traceback
├── CapacityError         memory that does not fit, with each share; exit code 2
└── CoreError             a rule of the policy core was broken by its caller or the world
"""

from __future__ import annotations

from pathlib import Path


class FineMoEError(Exception):
    """Root of the tree: catch this to catch everything FineMoE raises on purpose."""


class InputError(FineMoEError):
    """Bad input from outside. The message names the place, the value and the remedy."""


class TraceError(InputError):
    """A trace file that cannot be used.

    `place` is a row, column or byte position; the message reads
    ``FILE: PLACE: what is wrong (value). Remedy.``
    """

    def __init__(self, path: str | Path, problem: str, *, place: str = "", remedy: str = "") -> None:
        self.path = Path(path)
        self.place = place
        where = f"{path}: {place}: " if place else f"{path}: "
        super().__init__(where + problem + (f" {remedy}" if remedy else ""))


class SettingError(InputError):
    """An option, setting, profile or model description that cannot be used."""


class PolicyError(InputError):
    """A user's policy that failed: which one, where, and the user's own traceback.

    The text has several lines: ``POLICY: METHOD failed at PLACE`` and the traceback, from the user's file on.
    """

    def __init__(self, policy: str, problem: str, traceback: str = "") -> None:
        # All arguments are passed on: SimPy copies an exception by its arguments.
        super().__init__(policy, problem, traceback)
        self.policy = policy
        self.problem = problem
        self.traceback = traceback.rstrip("\n")

    def __str__(self) -> str:
        head = f"{self.policy}: {self.problem}"
        return f"{head}\n{self.traceback}" if self.traceback else head


class CapacityError(FineMoEError):
    """Memory that does not fit; the message states each share."""


class CoreError(FineMoEError):
    """A rule of the policy core was broken: an event out of order or out of range."""
