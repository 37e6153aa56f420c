"""The commands `finemoe-sim` and `finemoe`: thin over the Python API, with everything heavy imported late."""
