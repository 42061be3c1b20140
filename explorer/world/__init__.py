"""The ranks of one execution in one process: control pages, arenas, time, and the results that they must give."""
