"""How a stage runs on a device: one runtime a file behind the protocol in base.py."""
