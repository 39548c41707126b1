"""What goes where in GPU and host memory, decided before anything is allocated."""
