"""The model's modules, one file a system, assembled in `decoder`."""
