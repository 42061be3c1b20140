"""Which GPU reaches which, and over which links."""
