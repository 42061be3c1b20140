"""Messages between the ranks of a group over TCP, for calls on the CPU.

set_up      the ranks connect to each other
matching    which receive takes which message
peer        one connection: frames in and out
transport   the connections of a group, and the threads that wait for messages
progress    a thread that moves messages while no thread waits for them
faults      how a wait ends if a peer does not come, and which rank the error names
"""
