"""Steps as compiled graphs: `ForwardGradient(compile=True)`.

Methods, passes and layers know nothing of this package.
"""
