"""The simulated world: SimPy links, GPU memory, compute and search, and the grid of runs over it."""
