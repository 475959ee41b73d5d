"""`quern lab board`: a local page over the records of runs and studies. It reads files only and needs no extra."""
