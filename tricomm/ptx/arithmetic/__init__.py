"""What each computing instruction of PTX gives, bit for bit."""
