"""Which task runs next, and how the schedules of a campaign are chosen."""
