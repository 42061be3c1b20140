"""The links and peer access between GPUs."""
