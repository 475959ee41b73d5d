"""Chat tasks: ARC, MMLU, GSM8K, HumanEval, spelling and counting, and ChatCORE, the mean of the first five.

Their files, their prompts, the checks of programs, and the run over all tasks.
"""
