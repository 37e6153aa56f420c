"""Every exception that FineMoE raises on purpose.

FineMoEError
├── InputError            bad input from outside; exit code 2
│   ├── TraceError        a request or routing trace: names file, row, column, value, remedy
│   ├── SettingError      an option, setting, profile or model description
│   └── PolicyError       a user's policy raised or answered what means nothing; with the user's traceback
├── CapacityError         memory that does not fit, with each share; exit code 2
├── CoreError             a rule of the policy core was broken by its caller or the world
└── TransferError         the transfer engine cannot go on: an expert that no copy brings, a hung wait
"""

from __future__ import annotations

from collections.abc import Iterable
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

    `place` is iteration, layer and method, as far as there are any; the text reads
    ``POLICY: PLACE: what is wrong`` and has the traceback, from the user's file on, in the lines after that.
    """

    def __init__(self, policy: str, place: str, problem: str, traceback: str = "") -> None:
        # All arguments are passed on: SimPy copies an exception by its arguments.
        super().__init__(policy, place, problem, traceback)
        self.policy = policy
        self.place = place
        self.problem = problem
        self.traceback = traceback.rstrip("\n")

    def at(self, place: str) -> PolicyError:
        """The same with a wider place before its own."""
        return PolicyError(self.policy, f"{place}, {self.place}", self.problem, self.traceback)

    @property
    def headline(self) -> str:
        """The text without the traceback."""
        return ": ".join(part for part in (self.policy, self.place, self.problem) if part)

    def __str__(self) -> str:
        return f"{self.headline}\n{self.traceback}" if self.traceback else self.headline


class CapacityError(FineMoEError):
    """Memory that does not fit; the message states each share."""


class CoreError(FineMoEError):
    """A rule of the policy core was broken: an event out of order or out of range."""


class TransferError(FineMoEError):
    """The transfer engine cannot go on: the message says what failed and where."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question for the nearest known word, after a space; nothing where none is near (difflib's ratio)."""
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""
