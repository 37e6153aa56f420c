"""Real models: what a transformers Mixture-of-Experts model routes and computes (extra `real`).

Nothing outside this package imports torch, and the commands import this package only when they run.
"""
