"""Commands of `tricomm` that have a file of their own."""
