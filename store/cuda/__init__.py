"""GPU memory that ranks share: the driver calls, and the kinds of memory made of them."""
