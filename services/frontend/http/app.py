"""The HTTP door: routes over the core."""

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.core import FrontendCore
from services.frontend.http.chat import ChatCompletions
from services.frontend.http.completions import Completions
from services.frontend.http.errors import add_error_handlers
from services.frontend.http.operations import Operations
from services.frontend.http.text import TextEndpoints
from services.frontend.http.token_stream import TokenStream
from services.frontend.peer_stats import PeerStats


def build_app(core: FrontendCore, stats: PeerStats, max_body_bytes: int) -> FastAPI:
    text = TextEndpoints(core, max_body_bytes)
    operations = Operations(core, stats)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", ChatCompletions(core, max_body_bytes).post, methods=["POST"]),
        Route("/v1/completions", Completions(core, max_body_bytes).post, methods=["POST"]),
        Route("/v1/generate/stream", TokenStream(core, max_body_bytes).post, methods=["POST"]),
        Route("/v1/models", operations.models, methods=["GET"]),
        Route("/v1/models/{name:path}", operations.model, methods=["GET"]),
        Route("/v1/telemetry", operations.telemetry, methods=["GET"]),
        Route("/tokenize", text.tokenize, methods=["POST"]),
        Route("/detokenize", text.detokenize, methods=["POST"]),
        Route("/health", operations.health, methods=["GET"]),
        Route("/ready", operations.ready, methods=["GET"]),
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/v1/metrics", operations.metrics, methods=["GET"]),
    ]
    app = FastAPI(openapi_url=None, routes=routes)
    app.add_middleware(_SingleSlash)
    add_error_handlers(app)
    return app


class _SingleSlash:
    """`//v1/…` is `/v1/…`: base URLs that end in a slash are common."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            scope["path"] = "/" + scope["path"].lstrip("/")
        await self._app(scope, receive, send)
