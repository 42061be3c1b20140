"""What calls cost: counters, timers, and the file that publishes them."""
