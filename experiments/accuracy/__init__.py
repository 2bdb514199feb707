"""How accurate batch normalisation is, where that is hard."""
