"""Pictures of results. Reads results only; matplotlib (extra `report`) is imported when one is drawn."""
