from tests.frontend_system import (
    answer,
    engine,
    engine_server,
    eventually,
    frontend,
    http,
    info,
    load_the_tokenizer_once,
    model_path,
    tokenizer,
)

__all__ = [
    "answer",
    "engine",
    "engine_server",
    "eventually",
    "frontend",
    "http",
    "info",
    "load_the_tokenizer_once",
    "model_path",
    "tokenizer",
]
