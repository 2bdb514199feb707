"""Who updates the running statistics of batch normalisation, when, and by what."""
