"""`python -m finemoe` is the `finemoe` command."""

from .cli.main import main

main()
