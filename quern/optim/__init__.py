"""Update rules and schedules: Muon, AdamW, and which parameters belong to which group.

A rule gets tensors and scalars, never a process group; parallel/ decides who owns which parameter.
"""
