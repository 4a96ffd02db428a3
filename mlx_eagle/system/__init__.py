"""What the package needs of the machine it runs on: files, hub, terminal, device and versions."""
