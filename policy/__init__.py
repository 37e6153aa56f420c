"""The Python face of the policy core: model descriptions, settings, events and commands, named systems."""
