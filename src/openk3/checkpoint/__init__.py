"""The release's checkpoint layout and openk3's model, both ways. Names of the release occur here and nowhere else."""
