"""Collective operations over nested structures of tensors, DTensors, and random states."""
