"""The parts of a communicator: group, launcher, planner, collectives, point to point, and the monitor."""
