"""Small models for trials and tests. Each function returns a module in eval mode and its example inputs."""
