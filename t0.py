import time

t = time.process_time()
from memory_manager import *

print("import", time.process_time() - t)
m = MemoryManager(MemoryConfig())
print("ctor", time.process_time() - t)
