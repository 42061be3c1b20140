"""Measurement: benchmark, history, cost model, tuner, reports. Uses only public names of tricomm."""
