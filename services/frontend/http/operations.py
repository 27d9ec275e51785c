"""The endpoints that say what is served and whether it is: models, health, readiness."""

from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.errors import not_found, unavailable
from services.frontend.core import FrontendCore
from services.frontend.http.spelling import to_json
from services.frontend.http.telemetry import telemetry_object
from services.frontend.peer_metrics import PeerCollector
from services.frontend.peer_stats import PeerStats
from services.frontend.served_model import ALIAS, ServedModel

_RETRY_MS = 1000


class Operations:
    def __init__(self, core: FrontendCore, stats: PeerStats) -> None:
        self._core = core
        self._stats = stats

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request would be served now."""
        if (reason := self._core.not_ready_reason) is not None:
            raise unavailable(reason, "NOT_READY", _RETRY_MS)
        return _json({"status": "ready", "model": self._core.model().name})

    async def models(self, request: Request) -> Response:
        model = self._core.model()
        return _json({"object": "list", "data": [_model(model, name) for name in (model.name, ALIAS)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model = self._core.model(name)
        if not name:
            raise not_found("no model is named", "MODEL_NOT_FOUND", "model")
        return _json(_model(model, name))

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: what the frontend counted, then what its peers say now."""
        snapshot = await self._stats.snapshot()
        own = generate_latest(self._core.metrics.registry)
        peers = generate_latest(PeerCollector(snapshot, self._core.link.model))
        return Response(own + peers, 200, None, CONTENT_TYPE_LATEST)

    async def telemetry(self, request: Request) -> Response:
        """The same moment as one JSON object."""
        snapshot = await self._stats.snapshot()
        return _json(telemetry_object(self._core, snapshot))


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": "nexuskv",
        "root": model.name,
        "parent": None,
        "max_model_len": model.info.max_model_len,
    }


def _json(value: Any) -> Response:
    return Response(to_json(value), 200, None, "application/json")
