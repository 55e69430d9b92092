"""`python -m gradguess` is the command `gradguess`."""

from gradguess.cli import main

if __name__ == "__main__":
    main()
