"""The simulated world: a discrete-event model of links, memory, compute and search around the policy core."""
