"""`tricomm bench`."""
