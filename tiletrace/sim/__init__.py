"""Runs the PTX that goes to the GPU on a CPU, with numpy: results, and what is wrong (docs/simulator.md)."""
