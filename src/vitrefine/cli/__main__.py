"""`python -m vitrefine.cli`, where the console script is not on the path."""

from vitrefine.cli import main

main()
