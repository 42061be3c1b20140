"""What watches over a group: what runs, which peers it waits for, and the thread that looks."""
