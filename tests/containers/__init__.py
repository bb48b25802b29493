"""What `scripts/test-containers` runs: the image, the Compose file and the Kubernetes objects, in real containers."""
