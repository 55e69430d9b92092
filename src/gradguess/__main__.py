"""`python -m gradguess` is the command `gradguess`, which comes with the lab."""

try:
    from gradguess_lab.cli import main
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The command gradguess comes with the lab, which needs {error.name}: pip install -e lab, in a checkout of "
        "gradguess's repository."
    ) from None

if __name__ == "__main__":
    main()
