"""Layer normalisation and its gradients: OneFlow's issue with this layer and its peers."""
