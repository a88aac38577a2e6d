"""`python -m spec_ops`."""

from spec_ops.cli import main

main()
