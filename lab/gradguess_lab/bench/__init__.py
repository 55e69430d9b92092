"""What a step costs: time and memory of every method against backpropagation, measured and written as JSON."""
