"""Small models of our own, to try and to test with: each function returns a module in eval mode and its example inputs."""
