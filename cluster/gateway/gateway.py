"""The HTTP application: routes and error handlers. Generation is in :mod:`cluster.gateway.generation_endpoint`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, cast, get_args

from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from baton.core.errors import BatonError, InternalError, InvalidRequestError, NotFoundError, NoWorkerError
from baton.core.roles import POOLS
from baton.core.slo import SloClasses
from baton.core.version import package_version
from baton.engine.models.tokenizer import Tokenizer
from baton.explain.timelines import Order
from baton.grammar.compiler import GrammarCompiler
from cluster.autoscaling.autoscaler_config import how_to_sleep
from cluster.gateway.access import AccessControl, OriginGuard, api_key_of
from cluster.gateway.api_keys import ApiKeys
from cluster.gateway.bodies import BodyReader
from cluster.gateway.endpoints import ENDPOINTS
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.generation_endpoint import GenerationEndpoint
from cluster.gateway.http_edge import (
    CorsMiddleware,
    JsonResponse,
    RequestContextMiddleware,
    RequestTimesMiddleware,
    allowed_methods,
    error_answer,
    error_body_for,
    error_response,
)
from cluster.gateway.jobs.batches_endpoint import BatchesEndpoint
from cluster.gateway.jobs.files_endpoint import FilesEndpoint
from cluster.gateway.lenient_routes import LenientRoutes
from cluster.gateway.openai.json_body import json_limits, shown
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.plan import GatewayLimits, check_model
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.responses import model_body
from cluster.gateway.openai.rounds import add_texts_to_timeline
from cluster.gateway.openapi import MAX_LISTED, MAX_WORKERS, describe_api, page
from cluster.gateway.origins import OriginPolicy
from cluster.gateway.page.kept_answer import KeptAnswer
from cluster.gateway.page.live_feed import LiveFeed, LiveResponse
from cluster.gateway.page.page_routes import add_page
from cluster.gateway.speculation_methods import describe_methods
from cluster.gateway.tokenize_endpoint import TokenizeEndpoint
from cluster.gateway.work_threads import WorkThreads
from cluster.jobs.jobs import Jobs
from cluster.requests.generation import FinishedRequest, Generator
from cluster.telemetry.metrics import HttpMetrics


class AdminBackend(Protocol):
    """The control plane, as the gateway sees it. Every dictionary is ready for JSON."""

    async def status(self) -> dict[str, Any]:
        """Pools, workers, blocks in use and requests in flight."""
        ...

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        """Sets the number of workers of the named pools and reports the changes it started.

        Args:
            targets: number of workers by pool; ``None`` leaves the size to the autoscaler.

        Raises:
            BatonError: a pool does not exist or cannot have that size.
        """
        ...

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        """Moves a worker from one pool to the other, once it is drained.

        Raises:
            BatonError: the role cannot change, or the pool has no worker to spare.
        """
        ...

    async def plan(self) -> dict[str, Any]:
        """The next decision of the autoscaler and its reasons, whether or not it is enabled."""
        ...

    async def advise(self) -> dict[str, Any]:
        """A better use of the same workers for the observed traffic, and better drafts."""
        ...

    async def trace(self) -> list[dict[str, Any]]:
        """The recorded traffic as lines of Mooncake's format: times, lengths and shared prefixes, without text.

        Raises:
            InvalidRequestError: nothing is recorded.
        """
        ...

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        """The waterfall of a request.

        Args:
            owner: tag of the API key whose requests may be read; ``None`` allows all.

        Raises:
            NotFoundError: the owner has no such request, or its timeline is no longer kept.
        """
        ...

    async def requests(self, order: Order, limit: int) -> list[dict[str, Any]]:
        """The newest or the slowest of the requests whose timelines are kept, see ``TimelineStore.listing``."""
        ...

    async def metrics(self) -> bytes:
        """Metrics in Prometheus' text format."""
        ...


_PREFLIGHT_S = 3600
"""How long a browser may remember the answer to a preflight."""
_AUTO = "auto"
"""Stands for a number of workers that the autoscaler chooses."""
_NAMES = [endpoint.name for endpoint in ENDPOINTS]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    admin: AdminBackend,
    limits: GatewayLimits,
    metrics: HttpMetrics | None = None,
    on_finished: Callable[[FinishedRequest], None] | None = None,
    *,
    slo_classes: SloClasses | None = None,
    api_keys: ApiKeys | None = None,
    open_paths: Collection[str] = (),
    origins: OriginPolicy | None = None,
    cors_origins: Sequence[str] = (),
    is_kept: Callable[[str], bool] = lambda _: False,
    dialect: Dialect | None = None,
    grammars: GrammarCompiler | None = None,
    specials_are_text: bool = False,
    jobs: Jobs | None = None,
    has_page: bool = True,
    live: LiveFeed | None = None,
) -> FastAPI:
    """The application for one served model. It has no global state.

    Args:
        on_finished: called for every request that reached the generator, when its response has been sent.
        metrics: counts the requests; ``None`` disables that.
        slo_classes: ``None`` means the built-in ones.
        api_keys: ``None`` or empty if requests need no key.
        open_paths: paths that need no key, besides ``/health``.
        origins: what web pages may do while requests need no key; ``None`` means everything.
        cors_origins: origins whose web pages may read answers.
        is_kept: whether an id belongs to the timeline of an earlier request, so that it must not be used again.
        dialect: how the model writes calls and reasoning; ``None`` finds it out.
        grammars: compiles grammars for the model; ``None`` makes one when it is needed.
        specials_are_text: special tokens in the content of messages are encoded as text.
        jobs: files and batches; ``None`` refuses them.
        has_page: browsers get a page at ``/``.
        live: snapshots of ``admin``; the caller closes it before the server stops. ``None`` makes one.
    """
    api_keys = ApiKeys() if api_keys is None else api_keys
    access = AccessControl(api_keys, open_paths)
    checks = [Depends(access.check)]
    app = FastAPI(
        title="baton", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, dependencies=checks
    )
    app.add_middleware(LenientRoutes)
    if origins is not None:
        app.add_middleware(OriginGuard, policy=origins, api_keys=api_keys)
    app.add_middleware(RequestContextMiddleware, metrics=metrics or HttpMetrics(CollectorRegistry()))
    if cors_origins:  # around the others, so that pages can read errors, and a preflight needs no key
        app.add_middleware(
            CorsMiddleware,
            allow_origins=cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("*",),
            max_age=_PREFLIGHT_S,
        )
    app.add_middleware(RequestTimesMiddleware)  # the last one added is the outermost
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if has_page:
        add_page(app)
    threads = WorkThreads()
    bodies = BodyReader(limits.max_body_bytes, json_limits(generator.model.max_model_len))
    encoder = PromptEncoder(tokenizer, threads, dialect, grammars, specials_are_text=specials_are_text)
    classes = slo_classes or SloClasses()
    endpoint = GenerationEndpoint(generator, tokenizer, limits, classes, bodies, encoder, on_finished, is_kept)
    _add_generation_routes(app, generator, endpoint, classes)
    tokenize = TokenizeEndpoint(generator, tokenizer, encoder, bodies, threads)
    app.post("/tokenize", response_model=None)(tokenize.tokenize)
    app.post("/detokenize", response_model=None)(tokenize.detokenize)
    _add_job_routes(app, FilesEndpoint(jobs), BatchesEndpoint(jobs, bodies))
    _add_health_routes(app, generator)
    _add_admin_routes(app, admin, bodies, encoder)
    _add_live_route(app, live or LiveFeed(admin), access.allows)
    return app


def _add_generation_routes(app: FastAPI, generator: Generator, endpoint: GenerationEndpoint, slo: SloClasses) -> None:
    app.post("/v1/completions", response_model=None)(endpoint.complete)
    app.post("/v1/chat/completions", response_model=None)(endpoint.chat)
    app.post("/v1/responses", response_model=None)(endpoint.create_response)
    app.post("/v1/messages", response_model=None)(endpoint.create_message)
    app.post("/v1/messages/count_tokens", response_model=None)(endpoint.count_message_tokens)

    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        models = [model_body(name, generator.model) for name in generator.model.names]
        return JsonResponse({"object": "list", "data": models, "slo_classes": [each.name for each in slo.all]})

    # A path parameter, because hub ids contain a slash.
    @app.get("/v1/models/{name:path}", response_model=None)
    async def get_model(name: str) -> Response:
        return JsonResponse(model_body(check_model(name, generator.model), generator.model))

    @app.get("/v1/speculation", response_model=None)
    async def list_methods() -> Response:
        return JsonResponse(describe_methods(generator.model))


def _add_job_routes(app: FastAPI, files: FilesEndpoint, batches: BatchesEndpoint) -> None:
    app.post("/v1/files", response_model=None)(files.create)
    app.get("/v1/files", response_model=None)(files.list)
    app.get("/v1/files/{file_id}", response_model=None)(files.get)
    app.delete("/v1/files/{file_id}", response_model=None)(files.delete)
    app.get("/v1/files/{file_id}/content", response_model=None)(files.content)
    app.post("/v1/batches", response_model=None)(batches.create)
    app.get("/v1/batches", response_model=None)(batches.list)
    app.get("/v1/batches/{batch_id}", response_model=None)(batches.get)
    app.post("/v1/batches/{batch_id}/cancel", response_model=None)(batches.cancel)


def _add_health_routes(app: FastAPI, generator: Generator) -> None:
    document = describe_api()
    docs_page = page(document)

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return JsonResponse(document)

    @app.get("/docs", response_model=None)
    async def docs() -> Response:
        return Response(docs_page, media_type="text/html")

    @app.get("/", response_model=None)
    async def root() -> Response:
        body = {"name": "baton", "version": package_version(), "endpoints": _NAMES}
        return JsonResponse(body, headers={"Vary": "Accept"})

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": package_version()})

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return JsonResponse({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        if not generator.is_ready():
            raise NoWorkerError(
                "Not ready: at least one pool has no healthy worker. See GET /admin/status for the state of each pool."
            )
        return JsonResponse({"status": "ready", "model": generator.model.name})


def _add_admin_routes(app: FastAPI, admin: AdminBackend, bodies: BodyReader, encoder: PromptEncoder) -> None:
    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(await admin.metrics(), headers={"Content-Type": _METRICS_TYPE})

    @app.get("/v1/requests/{request_id}/timeline", response_model=None)
    async def timeline(request: Request, request_id: str) -> Response:
        api_key = api_key_of(request)
        owner = None if api_key is None or api_key.is_admin else api_key.owner
        found = await admin.timeline(request_id, owner)
        await add_texts_to_timeline(found, encoder)
        return JsonResponse(found)

    @app.get("/v1/requests", response_model=None)
    async def requests(request: Request) -> Response:
        order, limit = _parse_listing(request.query_params)
        return JsonResponse({"object": "list", "data": await admin.requests(order, limit)})

    @app.get("/admin/status", response_model=None)
    async def status() -> Response:
        return JsonResponse(await admin.status())

    @app.post("/admin/scale", response_model=None)
    async def scale(request: Request) -> Response:
        targets = _parse_targets(await bodies.read_object(request))
        return JsonResponse(await admin.scale(targets))

    @app.post("/admin/move", response_model=None)
    async def change_role(request: Request) -> Response:
        source, destination = _parse_move(await bodies.read_object(request))
        return JsonResponse(await admin.change_role(source, destination))

    @app.get("/admin/plan", response_model=None)
    async def plan() -> Response:
        return JsonResponse(await admin.plan())

    advice = KeptAnswer(admin.advise)

    @app.get("/admin/advise", response_model=None)
    async def advise(request: Request) -> Response:
        query = request.query_params
        check_known(query, ("max_age_s",), "query parameter")
        given = query.get("max_age_s")
        return JsonResponse(await advice.get(0 if given is None else _parse_count("max_age_s", given)))

    @app.get("/admin/trace", response_model=None)
    async def trace() -> Response:
        return JsonResponse({"requests": await admin.trace()})


def _add_live_route(app: FastAPI, feed: LiveFeed, allows: Callable[[Request], bool]) -> None:
    @app.get("/admin/live", response_model=None)
    async def live(request: Request) -> Response:
        check_known(request.query_params, ("snapshots",), "query parameter")
        num = request.query_params.get("snapshots")
        return LiveResponse(feed, lambda: allows(request), None if num is None else _parse_count("snapshots", num))


def _parse_move(body: dict[str, object]) -> tuple[str, str]:
    check_known(body, ("from", "to"), "key")
    pools = []
    for key in ("from", "to"):
        pool = body.get(key)
        if not isinstance(pool, str) or pool not in POOLS:
            raise InvalidRequestError(f"{key} must be one of {', '.join(POOLS)}, got {shown(pool)}.", param=key)
        pools.append(pool)
    return pools[0], pools[1]


def _parse_targets(body: dict[str, object]) -> dict[str, int | None]:
    check_known(body, POOLS, "pool")
    if not body:
        raise InvalidRequestError('Name at least one pool, as in {"prefill": 2, "decode": 3}.')
    targets: dict[str, int | None] = {}
    for pool, target in body.items():
        if target == _AUTO:
            targets[pool] = None
            continue
        # type() and not isinstance(), since a bool is an int.
        if type(target) is not int or not 1 <= target <= MAX_WORKERS:
            hint = f" {how_to_sleep(pool)}" if target == 0 else ""
            raise InvalidRequestError(
                f"{pool} must be an integer between 1 and {MAX_WORKERS}, or {_AUTO}, got {shown(target)}.{hint}",
                param=pool,
            )
        targets[pool] = target
    return targets


def _parse_listing(query: Mapping[str, str]) -> tuple[Order, int]:
    check_known(query, ("order", "limit"), "query parameter")
    order = query.get("order", "newest")
    if order not in get_args(Order):
        raise InvalidRequestError(f"order must be {', '.join(get_args(Order))}, got {shown(order)}.", param="order")
    return cast(Order, order), _parse_count("limit", query.get("limit", "20"))


def _parse_count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_LISTED):
        raise InvalidRequestError(f"{name} must be between 1 and {MAX_LISTED}, got {shown(text)}.", param=name)
    return int(text)


async def _on_baton_error(request: Request, error: Exception) -> Response:
    return error_answer(request.scope, error if isinstance(error, BatonError) else InternalError("Internal error."))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers errors of the framework itself: an unknown route, or a method that the route does not take."""
    if not isinstance(error, HTTPException):
        return error_response(InternalError("Internal error."))
    asked = f"{request.method} {request.url.path[:100]}"
    if error.status_code == 404:
        near = difflib.get_close_matches(asked, _NAMES, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else "GET / lists the endpoints."
        missing = NotFoundError(f"There is no endpoint {asked}. {hint}")
        return error_response(missing, error_body_for(request.scope, missing))
    headers, text = dict(error.headers or {}), str(error.detail)
    if error.status_code == 405:
        headers["Allow"] = allowed_methods(request)
        text = f"{asked} is not allowed; the method must be {headers['Allow']}."
    body = error_body_for(request.scope, InvalidRequestError(text))
    return JsonResponse(body, status_code=error.status_code, headers=headers)
