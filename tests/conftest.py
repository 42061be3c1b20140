"""What processes that tests start inherit."""

import signal

# A shell's background jobs ignore Ctrl-C, and so would all processes that they start. A handler ends with exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)
