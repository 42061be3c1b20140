"""Measuring: benchmark, history, cost model, tuner, reports. Uses the public names of tricomm and nothing below."""
