"""Batching, request state, metrics and result files, shared by the simulated and the real world.

Nothing here has a clock or a device: times come in from the world as seconds.
"""
