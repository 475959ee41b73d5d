"""Several server processes behind one port: the processes (processes.py, process.py), and who answers (router.py)."""
