"""Which GPU reaches which, and by what."""
