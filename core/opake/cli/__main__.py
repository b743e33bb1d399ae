"""`python -m opake.cli`, where the console script is not on the path."""

from opake.cli import main

main()
