"""The generator: keeps one engine full and sends scored groups to the buffer.

worker (lease -> generate -> score -> submit), weights_in (stage -> swap), engine (the protocol),
vllm_engine and scripted_engine (its two implementations), environments (episodes), rewards
(scores, in processes that can be killed). Started by `python -P -m generators CONFIG`.
"""
