"""`asyncrl-launch`: checks what the user asked for, places processes, supervises, shows progress."""
