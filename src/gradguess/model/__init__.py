"""The model and its sites: what is differentiated, where gradients are guessed, and how calls are watched."""
