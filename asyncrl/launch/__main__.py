"""`python -m asyncrl.launch`: the same as `asyncrl-launch`."""

from asyncrl.launch.start import main

main()
