"""FineMoE: what an expert offloading policy gives, for any MoE model, machine and traffic.

`finemoe.simulate(...)` and, on a real model, `finemoe.serve(...)` are the API behind the `finemoe-sim`
command; `finemoe.load_model(...)` gives a transformers model whose experts are offloaded.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "serve", "simulate"]

if TYPE_CHECKING:
    from .realexec.load import load_model
    from .realexec.serve import serve
    from .sim.run import simulate


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that `import finemoe` stays instant."""
    if name == "simulate":
        from .sim.run import simulate

        return simulate
    if name in ("load_model", "serve"):
        from .realexec.extras import require

        require(f"finemoe.{name}", "torch", "transformers")
        from .realexec.load import load_model
        from .realexec.serve import serve

        return load_model if name == "load_model" else serve
    raise AttributeError(f"module 'finemoe' has no attribute {name!r}")
