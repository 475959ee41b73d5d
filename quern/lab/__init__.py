"""The lab: paired comparisons of ideas, sweeps, scaling fits, and a page that shows the records."""
