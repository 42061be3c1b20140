"""The compiled kernels, executed: the launch path of a GPU over a driver whose kernels the PTX machine runs."""
