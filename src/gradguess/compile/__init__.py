"""Steps as compiled graphs: `ForwardGradient(compile=True)`.

| file | what it does |
|---|---|
| `compiler` | runs a step, traces it when its kind comes again, and runs the graph as fused kernels from then on |
| `signature` | the key of a kind of step: all that a graph assumes |
| `randomness` | random numbers that the model draws, drawn before the graph runs |
| `trace` | the operations of a function, each value computed once |
| `norms` | gradients of norms, from those of the layers above |

Methods, passes and layers know nothing of this package.
"""
