"""Messages of bytes between the ranks of a group over TCP: with tags, deadlines and named faults.

transport  the connections of a group, and the threads that wait for messages
waits      how a wait ends if a peer does not come, and which rank the error names
progress   a thread that moves messages while no thread waits for them
peer       one connection: frames in and out
matching   which receive takes which message
set_up     the ranks connect to each other
"""
