"""`fastcheck demo`: train on four nodes, lose one for real, go on bit for bit from the others' RAM.

settings   what is trained and for how long
model, data, trainer   one rank, as any training script would look; the only parts that need torch
ranks      the launcher: starts a process per rank, reads what they say, ends them
scenario   the story: up, train, kill, detect, restart, load, finish, compare
report     the figures and the verdict, from what the ranks said
display    what a person sees meanwhile
"""
