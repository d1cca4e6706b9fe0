"""What takes the place of a stock module: tokens, images, frames, angles, attention."""
