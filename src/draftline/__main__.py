"""`python -m draftline`: what the command `draftline` runs."""

from draftline.cli import main

main()
