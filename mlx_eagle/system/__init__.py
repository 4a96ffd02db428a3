"""Files, hub, terminal, device and versions: everything the package needs of its machine."""
