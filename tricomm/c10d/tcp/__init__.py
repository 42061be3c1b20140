"""Messages between the ranks of a group over TCP, for calls on the CPU.

messages             send and recv of tensors
message_collectives  every collective, as exchanges of messages
call_records         how the ranks compare a call
transport            the connections of a group, and the threads that wait for messages
waits                how a wait ends if a peer does not come, and which rank the error names
waker                ends a thread's wait for sockets
progress             a thread that moves messages while no thread waits for them
peer                 one connection: frames in and out
matching             which receive takes which message
set_up               the ranks connect to each other
"""
