"""Results to a page that can be read, cited and checked: HTML, PNG, SVG, CSV, LaTeX."""

from gradguess.report.comparison import write_comparison
from gradguess.report.write import write_report

__all__ = ["write_comparison", "write_report"]
