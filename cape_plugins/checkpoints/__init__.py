"""What files of trained models hold, read without their host."""
