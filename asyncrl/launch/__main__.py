"""`python -m asyncrl.launch`: the same as `asyncrl-launch`."""

from asyncrl.launch.cli import main

main()
