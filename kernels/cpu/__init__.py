"""Native CPU operators: C++ sources, their build, their C interface."""
