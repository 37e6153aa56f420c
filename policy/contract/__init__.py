"""A contract that every system keeps, as tests that anyone can run over a system; needs pytest.

from finemoe.policy.contract import SystemContract


class TestMyPolicy(SystemContract):
    system = "my_policy.py:MyPolicy"
"""

from .suite import SystemContract

__all__ = ["SystemContract"]
