"""FTW: a checkpoint whose experts lie in one file in the layout of the pool, to be read at the speed of the disk."""
