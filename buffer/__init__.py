"""The buffer: the program that hands out prompts, keeps finished groups, and closes batches.

policy (who may be trained when: pure) -> ledger (what became of each prompt) -> members (who is
there) -> server (the sockets). It needs neither torch nor vllm.
"""
