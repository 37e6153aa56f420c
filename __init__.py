"""FineMoE: what an expert offloading policy gives, for any MoE model, machine and traffic.

`finemoe.simulate(...)` is the API behind the `finemoe-sim` command.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "simulate"]

if TYPE_CHECKING:
    from .sim.run import simulate


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that `import finemoe` stays instant."""
    if name == "simulate":
        from .sim.run import simulate

        return simulate
    raise AttributeError(f"module 'finemoe' has no attribute {name!r}")
