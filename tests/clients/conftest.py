from tests.frontend_system import (
    answer,
    engine,
    eventually,
    frontend,
    http,
    info,
    load_the_tokenizer_once,
    model_path,
    module_client,
    system,
    tokenizer,
)

__all__ = [
    "answer",
    "engine",
    "eventually",
    "frontend",
    "http",
    "info",
    "load_the_tokenizer_once",
    "model_path",
    "module_client",
    "system",
    "tokenizer",
]
