"""`asyncrl-launch`: checks what was asked for, places processes, supervises, shows progress."""
