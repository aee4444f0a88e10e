"""Run passes of the model: eagerly, as one compiled graph, or with its layers compiled one by one."""

from warmkv.replicas.engine.forward.compiled import Compiled, CompiledForward, LayeredForward, compiled, compiles
from warmkv.replicas.engine.forward.eager import ModelRunner

Forward = ModelRunner | Compiled

__all__ = ["Compiled", "CompiledForward", "Forward", "LayeredForward", "ModelRunner", "compiled", "compiles"]
