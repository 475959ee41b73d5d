"""The connection to a Ray cluster, whose machines prepare text (text/encode/) and train arms of a comparison (lab/)."""
