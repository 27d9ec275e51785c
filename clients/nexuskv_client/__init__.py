"""Python client of NexusKV. It needs grpcio and protobuf, nothing else.

    from nexuskv_client import Client

    async with Client("127.0.0.1:50051") as client:
        print(await client.chat("What is the capital of France?", max_tokens=32))

        async with client.stream("Once upon a time", max_tokens=64, temperature=0.7) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.usage)

A prompt is a text, a list of token ids or a list of {"role", "content"} messages. Sampling fields are those
of SamplingParams in inference.proto; what is left out is the model's default. A stream that is left early is
aborted on the server, and so is a request whose deadline passes.

    try:
        await client.generate("Hello", temperature=-1, deadline_s=5)
    except InvalidArgumentError as error:
        print(error.field, error.reason, error)
"""

from nexuskv_client.client import Client, Prompt, Stream
from nexuskv_client.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NexusKVError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from nexuskv_client.results import (
    Choice,
    DraftUsage,
    FinishReason,
    Generation,
    Model,
    ServerInfo,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)

__all__ = [
    "CancelledError",
    "Choice",
    "Client",
    "DeadlineExceededError",
    "DraftUsage",
    "FinishReason",
    "Generation",
    "InvalidArgumentError",
    "Model",
    "NexusKVError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "Prompt",
    "ServerError",
    "ServerInfo",
    "Stream",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
