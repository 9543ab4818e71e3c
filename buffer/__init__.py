"""The buffer: the program that hands out prompts, keeps finished groups, and closes batches.

policy (who may be trained when: pure) -> ledger (what became of each prompt) -> books (all that the
journal holds) -> watch (who is there, and what time changes) -> run (all of it together) -> server
(the sockets). It needs neither torch nor vllm.
"""
