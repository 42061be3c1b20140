"""`python -m tricomm` is the `tricomm` command."""

from tricomm.cli import main

if __name__ == "__main__":
    main()
