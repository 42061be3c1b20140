"""Watches over a group: the call in flight, the peers that it waits for, and the thread that checks them."""
