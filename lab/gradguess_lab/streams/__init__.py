"""Tasks on endless streams, and runs on them."""
