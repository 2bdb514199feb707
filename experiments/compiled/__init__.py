"""What only a compiler can say of the layers on a GPU: traffic, registers, spills, atomics."""
