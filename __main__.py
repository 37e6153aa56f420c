"""`python -m finemoe` is the `finemoe` command."""

from .cli.entry import main

main()
