"""What is known of a layer in closed form: gate, parameter gradient, tangent (`layers.table`), positions.

A layer that is not in the table is not refused. Its tangent comes from PyTorch's forward mode, its parameter gradient
from a vjp of its own short piece of the graph, and it has no gate.
"""
