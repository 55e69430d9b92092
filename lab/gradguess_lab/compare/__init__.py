"""Methods × tasks at equal epochs: `gradguess compare`."""
