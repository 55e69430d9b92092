"""Results to a page that can be read, cited and checked: HTML, PNG, SVG, CSV, LaTeX."""
