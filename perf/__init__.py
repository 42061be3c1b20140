"""Measuring: benchmark, environment report, kernel report. Uses the public names of tricomm and nothing below them."""
