"""Times batch norm and layer norm beside their peers, on a CPU and on a GPU."""
