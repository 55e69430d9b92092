"""Results to a page that can be read, cited and checked: HTML, PNG, SVG, CSV, LaTeX."""

from gradguess_lab.report.comparison import write_comparison
from gradguess_lab.report.write import write_report

__all__ = ["write_comparison", "write_report"]
