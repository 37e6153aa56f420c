"""The contract, over every system of ours, and over systems that break it."""

from __future__ import annotations

from finemoe.policy.contract import SystemContract
from finemoe.policy.systems import SYSTEMS


def contract_of(name: str) -> type[SystemContract]:
    """The contract's tests over one system."""
    return type(f"Test {name}", (SystemContract,), {"system": name})


# pytest collects the classes of a module by name.
globals().update({f"Test {name}": contract_of(name) for name in SYSTEMS})
