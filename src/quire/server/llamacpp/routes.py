"""llama-server's API: ``/completion``, ``/infill``, ``/slots``, ``/props``, ``/apply-template``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.server.http.bodies import BodyRoute, off_loop, parsed
from quire.server.http.context import Context, context_of, public_name
from quire.server.http.errors import ApiError, bad_field, busy
from quire.server.http.events import STREAMED, JsonAnswer, unless_gone
from quire.server.http.sites import page_reads_only
from quire.server.llamacpp import slots
from quire.server.llamacpp.body import InfillBody, LlamaBody, SlotBody, completion_of, prompts_of
from quire.server.llamacpp.replies import LlamaReply, settings_of
from quire.server.ollama.models import capabilities, template_of
from quire.server.openai.chat import answer_chat, rendered_chat
from quire.server.openai.completions import answer_completion, filling
from quire.server.openai.generation import Part, chat_defaults, in_texts
from quire.server.openai.protocol import ChatRequest
from quire.server.openai.replies import NOTHING, Reply, RunOptions, answer, answer_in_session

router = APIRouter(route_class=BodyRoute, tags=["llama.cpp"])

NO_STORE = (
    "slots are saved in the store: start the server with --state-dir DIR (llama-server's --slot-save-path) or --store"
)


@router.post("/completions", responses=STREAMED, include_in_schema=False)
@router.post("/completion", responses=STREAMED)
async def completion(request: Request, body: LlamaBody) -> Response:
    """Continue a prompt, as llama-server does."""
    context = context_of(request)
    prompts = await off_loop(request, lambda: prompts_of(body.prompt))
    return await _answered(request, await off_loop(request, lambda: completion_of(context, body)), prompts)


@router.post("/infill", responses=STREAMED)
async def infill(request: Request, body: InfillBody) -> Response:
    """Write the text between a prefix and a suffix."""
    context = context_of(request)
    before, others = body.input_prefix + body.prompt, [(one.filename, one.text) for one in body.input_extra]

    def fill() -> tuple[InfillBody, list[int]]:
        return filling(context, body, before, body.input_suffix, "input_suffix", others)

    filled, ids = await in_texts(context, request, len(await request.body()), fill)
    return await _answered(request, completion_of(context, filled), [[ids]])


async def _answered(request: Request, body: LlamaBody, prompts: list[Sequence[Part]]) -> Response:
    if body.slot is not None:
        slots.check_number(context_of(request), body.slot)

    async def run(reply: Reply, prepared: Sequence[Any], params: SamplingParams, options: RunOptions) -> Response:
        if body.slot is None:
            return await answer(reply, prepared, params, options)
        assert isinstance(reply, LlamaReply)
        if len(prepared) * params.n > 1:
            raise bad_field("id_slot", "a slot takes one prompt and one sample; leave id_slot out for several")
        if options.blend is not None:
            raise bad_field("blend", "a slot keeps exact state; leave blend or id_slot out")
        if request.state.reads_only:
            raise page_reads_only()
        begun = slots.begun(
            reply.context,
            request.state.owner,
            body.slot,
            params,
            prepared[0].tolist(),
            adapter=options.adapter,
            salt=options.cache_salt,
            afresh=body.cache_prompt is False,
        )
        source, reply.cached = await unless_gone(request, begun)
        if not body.no_answer:
            return await answer_in_session(reply, source)
        ids = source.session.tokens
        await source.aclose()
        output = RequestOutput(
            request_id=request.state.request_id, prompt=None, prompt_token_ids=ids, outputs=[NOTHING]
        )
        return JsonAnswer(reply.at_once([output]))

    return await answer_completion(request, body, LlamaReply, prompts=prompts, run=run)


@router.post("/apply-template")
async def apply_template(request: Request, body: ChatRequest) -> Response:
    """Return the prompt that a conversation becomes."""
    return JsonAnswer({"prompt": await rendered_chat(request, body)})


@router.post("/chat/completions", responses=STREAMED, include_in_schema=False)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, at the address of ``/v1/chat/completions`` without its version."""
    return await answer_chat(request, body)


@router.get("/props")
async def props(request: Request) -> Response:
    """Describe the server and its defaults."""
    return JsonAnswer(_described(context_of(request)))


def _described(context: Context) -> dict[str, Any]:
    """Describe the server, its model and what a completion gets that gives no parameters."""
    tokenizer, template = context.llm.tokenizer, template_of(context)
    found = capabilities(context)
    defaults = chat_defaults(context)
    special = {} if tokenizer is None else tokenizer.special_tokens
    return {
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": context.longest,
            "speculative": context.llm.config.speculative is not None,
            "is_processing": False,
            "params": settings_of(defaults, context),
        },
        "total_slots": slots.total(context),
        "model_alias": context.model_name,
        "model_path": public_name(context.llm.config.model),
        "chat_template": template or "",
        "chat_template_caps": {"supports_tools": "tools" in found, "supports_tool_calls": "tools" in found},
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"quire-{metadata.version('quire')}",
        "is_sleeping": False,
    }


@router.post("/props", include_in_schema=False)
async def change_props() -> Response:
    """Refuse the call: nothing global can be changed while the server runs."""
    raise ApiError(
        501, "the server's properties are fixed when it starts; give parameters in each request", code="unsupported"
    )


@router.get("/slots")
async def list_slots(
    request: Request,
    fail_on_no_slot: Annotated[bool, Query(description="Answer 503 if every slot is in use.")] = False,
) -> Response:
    """List the slots of this API key, and which are in use."""
    found = await slots.listed(context_of(request), request.state.owner)
    if fail_on_no_slot and all(one["is_processing"] for one in found):
        raise busy(503, f"all {len(found)} slots are in use; try again later", "no_slot")
    return JsonAnswer(found)


@router.post(
    "/slots/{id_slot}",
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": SlotBody.model_json_schema()}}}},
)
async def act_on_slot(
    request: Request,
    id_slot: int,
    action: Annotated[Literal["save", "restore", "erase"], Query(description="What to do with the slot's state.")],
) -> Response:
    """Save the state of a slot as a branch of the store, restore it from one, or give it up."""
    context, owner = context_of(request), request.state.owner
    slots.check_number(context, id_slot)
    if action == "erase":
        return JsonAnswer(await slots.erase(context, owner, id_slot))
    store = context.llm.engine.stored.store
    if store is None or not store.is_durable:
        raise ApiError(501, NO_STORE, code="unsupported")
    given = await request.body()
    filename = SlotBody.model_validate(parsed(given, SlotBody)).filename if given else None
    if filename is None:
        raise bad_field("filename", "filename is missing: the name under which the state is kept")
    act = slots.save if action == "save" else slots.restore
    return JsonAnswer(await unless_gone(request, act(context, owner, id_slot, filename)))
