"""Where `nexuskv up` puts its processes."""

from services.supervisor import SystemConfig


def addresses(arguments: dict[str, str], **environ: str) -> tuple[str, str]:
    """Of the memory manager and the engine, which everybody agrees on."""
    system = SystemConfig.load(arguments, environ)
    memory, engine = system.memory_manager.memory_listen, system.engine.engine_listen
    assert system.engine.memory_address == system.frontend.memory_address == memory
    assert system.frontend.engine_address == engine
    assert len({memory, engine, *(f"127.0.0.1:{port}" for port in ports(system))}) == 4
    return memory, engine


def ports(system: SystemConfig) -> tuple[int, int]:
    return system.frontend.http_port, system.frontend.grpc_port


def test_ports_are_free_ones_unless_they_are_given() -> None:
    arguments = {"http_port": "0", "grpc_port": "0"}
    assert not {"127.0.0.1:50052", "127.0.0.1:50053"} & {*addresses(arguments)}
    assert addresses({**arguments, "memory_listen": "127.0.0.1:7001"})[0] == "127.0.0.1:7001"
    assert addresses(arguments, NEXUSKV_ENGINE_LISTEN="127.0.0.1:7002")[1] == "127.0.0.1:7002"
    assert ports(SystemConfig.load({}, {})) == (8080, 50051)
