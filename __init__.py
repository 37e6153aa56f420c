"""FineMoE: what an expert offloading policy gives, for any MoE model, machine and traffic.

`finemoe.simulate(...)` is the API behind the `finemoe-sim` command, `finemoe.load_model(...)` an ordinary
transformers model whose experts live in a bounded cache (extra `real`).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "simulate"]

if TYPE_CHECKING:
    from .realexec.load import load_model
    from .sim.run import simulate


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that `import finemoe` stays instant."""
    if name == "simulate":
        from .sim.run import simulate

        return simulate
    if name == "load_model":
        from .realexec.extras import require

        require("finemoe.load_model", "torch", "transformers")
        from .realexec.load import load_model

        return load_model
    raise AttributeError(f"module 'finemoe' has no attribute {name!r}")
