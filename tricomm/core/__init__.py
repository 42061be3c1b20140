"""What a communicator is made of: group, launcher, planner, collectives, point to point, and what watches over them."""
