"""Channels of a communicator: calls that run side by side, what each runs at the moment, what a user holds of one."""
