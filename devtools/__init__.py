"""Tools for the developers of tricomm. They are not part of the wheel."""
