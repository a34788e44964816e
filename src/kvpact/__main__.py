"""`python -m kvpact`: the command, where its script is not on the path."""

from kvpact.cli.app import main

if __name__ == "__main__":
    main()
